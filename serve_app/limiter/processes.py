"""Names of processes by which another one on the same machine can tell that they have ended."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def process_name() -> str:
    """Names this process, and no other one ever. Its parts are the machine's boot, the pid's namespace, pid, start."""
    return f"{_machine()} {os.getpid()} {_start_of(os.getpid())} {uuid.uuid4().hex}"


def has_ended(name: str) -> bool:
    """Whether that process has certainly ended. False for one of another machine or container: that is not known."""
    try:
        machine, pid, start, _ = name.rsplit(" ", 3)
        if not machine or machine != _machine():
            return False
        os.kill(int(pid), 0)
        now = _start_of(int(pid))
        return now not in ("", start)  # the number belongs to another process by now
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False


def _machine() -> str:
    """The boot of this machine and the namespace of its process ids; "" where they can't be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """When a process started, in the kernel's ticks; "ended" for one that only waits to be reaped, "" if unknown."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "ended" if state in "ZX" else fields[18]
    except (OSError, IndexError, ValueError):
        return ""
