"""Finds the service that runs with a state folder, from the files that the launcher of `make serve` writes there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.settings import SettingsError, read_config

#: Subfolders of the run's folder for Ray and for HAProxy. HAProxy's has one folder per node.
RAY, HAPROXY = "ray", "ha"


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A running service: the launcher's process, and the folder of Ray's session."""

    launcher: int
    session: Path

    @property
    def folder(self) -> Path:
        """The folder of this run."""
        return self.session.parents[1]

    def haproxy_files(self, name: str) -> Iterator[Path]:
        return (self.folder / HAPROXY).glob(f"*/{name}")


def find_run(home: Path) -> LocalRun | None:
    """Returns the running service of this state folder, or None."""
    try:
        launcher = int((home / "run" / "lock").read_text().removeprefix("process "))
        session = (home / "logs" / "ray").readlink().parent  # the link points to FOLDER/ray/session_latest/logs
    except (OSError, ValueError):
        return None
    return LocalRun(launcher, session) if psutil.pid_exists(launcher) else None


def last_port(home: Path) -> int | None:
    """Returns the port of the last service that was started with this state folder, or None if it is unknown."""
    try:
        return int(read_config(home / "run" / "config.yaml")["http_options"]["port"])
    except (SettingsError, KeyError, TypeError, ValueError):
        return None
