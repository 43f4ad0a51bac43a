"""A program that another user of the machine runs against a service: `python intruder.py < PATHS`.

PATHS is a JSON array of files, folders and sockets; a socket in the abstract namespace begins with "@". The program
gives up root for user 65534 and prints those that it could read, change or talk to.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys

NOBODY = 65534
PATIENCE_S = 30.0


def reached(path: str) -> str | None:
    """Returns what could be done with the path, or None."""
    try:
        if path.startswith("@"):
            return talked(path)
        mode = os.lstat(path).st_mode
        if stat.S_ISSOCK(mode):
            return talked(path)
        if stat.S_ISDIR(mode):
            os.close(os.open(os.path.join(path, "intruder"), os.O_WRONLY | os.O_CREAT))
            return "made a file in"
        if stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY))
            return "read"
    except OSError:
        pass
    return None


def talked(path: str) -> str | None:
    """Connects, sends a length and waits: a service that wants to know who calls hangs up at once."""
    name = "\0" + path[1:] if path.startswith("@") else path
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as end:
            end.settimeout(PATIENCE_S)
            try:
                end.connect(name)
                end.send(b"\0\0\0\1")
                if kind == socket.SOCK_STREAM and end.recv(1) == b"":
                    return None
                return "talked to"
            except TimeoutError:
                return "was not hung up by"
            except OSError:
                continue
    return None


if __name__ == "__main__":
    paths = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    print(json.dumps([f"{what} {path}" for path in paths if (what := reached(path))]))
