"""Names processes, so that another process on the same machine can determine whether they have ended."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def process_name() -> str:
    """Returns a name that no other process ever has.

    Its parts are the ids of the machine's boot and of the pid namespace, the pid, the start time and a UUID.
    """
    return f"{_machine()} {os.getpid()} {_start_of(os.getpid())} {uuid.uuid4().hex}"


def has_ended(name: str) -> bool:
    """Returns whether the process has certainly ended. False for another machine or container, where it is unknown."""
    try:
        machine, pid, start, _ = name.rsplit(" ", 3)
        if not machine or machine != _machine():
            return False
        os.kill(int(pid), 0)
        now = _start_of(int(pid))
        return now not in ("", start)  # a zombie, or the pid now belongs to another process
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False


def _machine() -> str:
    """Returns the ids of this machine's boot and of the namespace of its process ids; "" if they cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """Returns the start time of a process in kernel ticks; "ended" for a zombie process, "" if it is unknown."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "ended" if state in "ZX" else fields[18]
    except (OSError, IndexError, ValueError):
        return ""
