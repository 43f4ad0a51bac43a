"""Checks before anything starts. Each failure is one line that says what to do."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import shutil
import socket
from pathlib import Path
from typing import IO

import psutil

from serve_app.contracts.units import GIB
from serve_app.model import bundled
from serve_app.storage.private_files import OTHERS

MIN_MEMORY = int(2.5 * GIB)  # bytes for Ray's processes and one replica with its weights and a small KV cache
MIN_DISK = 2 * GIB  # bytes for the converted model, the database and logs
OWN_PORTS = range(20000, 32768)  # above Ray's workers, below what Linux and macOS give to outgoing connections

#: A random order for each process: two processes rarely choose the same port, and one process uses no port twice.
_drawn = itertools.cycle(random.SystemRandom().sample(OWN_PORTS, len(OWN_PORTS)))


class LaunchError(Exception):
    """The service can't start; the message is one line for the person at the terminal."""


def check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise LaunchError(f"PORT must be from 1 to 65535, not {port}")
    if not is_free(port):
        raise LaunchError(f"port {port} is taken: stop the program that uses it, or choose another port with PORT=…")


def check_free_memory(available: int | None = None) -> None:
    if available is None:
        available = psutil.virtual_memory().available
    if available < MIN_MEMORY:
        raise LaunchError(
            f"too little memory: {available / GIB:.1f} GiB are available, {MIN_MEMORY / GIB:.1f} GiB are needed: "
            "close other programs"
        )


def check_free_disk(home: Path, needed: int = MIN_DISK) -> None:
    free = shutil.disk_usage(home).free
    if free < needed:
        raise LaunchError(f"{home} has {free / GIB:.1f} GiB of free disk, {needed / GIB:.0f} GiB are needed")


def prepare_home(home: Path) -> bool:
    """Creates the state folder. If an existing one is open to other users, closes it to them and returns True.

    Raises LaunchError instead if that folder may have other programs' files, or if the folder can't be used.
    """
    closed = False
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if home.stat().st_mode & OTHERS:
            if not _is_own(home):
                raise LaunchError(
                    f"{home} has other files, and other users can read it: set SERVE_APP_HOME to a new folder, or "
                    f"`chmod go= {home}` if it is for this service alone"
                )
            home.chmod(0o700)
            closed = True
        for folder in (home / "logs", home / "run"):
            folder.mkdir(exist_ok=True, mode=0o700)
        probe = home / "run" / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LaunchError(f"the state folder {home} can't be used ({error.strerror}): set SERVE_APP_HOME") from None
    return closed


def _is_own(home: Path) -> bool:
    """Returns whether the folder is empty, or an earlier start or `make setup` has used it."""
    used = home.name == ".serve-app" or (home / "secrets").is_dir() or (home / "models" / bundled.NAME).is_dir()
    return used or not any(home.iterdir())


def lock_home(home: Path) -> IO[str]:
    """Locks the state folder for this process, until the returned file is closed."""
    file = (home / "run" / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise LaunchError(f"{home} is in use by {owner}: stop that service or set another SERVE_APP_HOME") from None
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()}")
    file.flush()
    return file


def is_free(port: int) -> bool:
    """Whether the port is free to listen on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port(preferred: int | None = None) -> int:
    """Returns the preferred port if it is free, else one of `OWN_PORTS`.

    A port that the system picks would not be safe: until the service listens on it, half a minute later, an outgoing
    connection could take it.
    """
    if preferred is not None and is_free(preferred):
        return preferred
    for port in itertools.islice(_drawn, len(OWN_PORTS)):
        if is_free(port):
            return port
    raise LaunchError(f"no port from {OWN_PORTS[0]} to {OWN_PORTS[-1]} is free: stop programs that listen on them")
