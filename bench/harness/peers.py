"""Installs the programs that a benchmark compares us with, each into a separate folder outside version control.

The project's virtual environment does not change. An installed peer is left unchanged, a partly installed one is
installed again, and one that can't be installed is missing from the tables. `peer.json` in the folder of an installed
peer has its versions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.harness.command import PEERS

MARK = "peer.json"


class SetupError(Exception):
    """A peer could not be installed. The message is one line; details are in the log."""


Installer = Callable[[Path], dict[str, Any]]


def main(installers: Mapping[str, Installer], program: str, description: str, arguments: list[str] | None) -> int:
    """Runs the command line of a set-up. Returns the exit status: 0 if every chosen peer is installed."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--folder", type=Path, default=PEERS, help="folder to install into; default: .bench")
    parser.add_argument("--only", nargs="+", choices=sorted(installers), help="peers; default: all")
    parser.add_argument("--again", action="store_true", help="reinstall installed peers")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    missing = 0
    for name, install in installers.items():
        if options.only and name not in options.only:
            continue
        target = folder / name
        if (target / MARK).exists() and not options.again:
            print(f"{name}: {(target / MARK).read_text().strip()}", flush=True)
            continue
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        print(f"{name}: installing into {target}; the log is {target / 'setup.log'}", flush=True)
        try:
            facts = install(target)
        except SetupError as error:
            missing += 1
            print(f"{name}: not installed: {error}", flush=True)
            continue
        (target / MARK).write_text(json.dumps(facts) + "\n")
        print(f"{name}: {json.dumps(facts)}", flush=True)
    return 1 if missing else 0


def installed(folder: Path, name: str) -> dict[str, Any] | None:
    """The contents of a peer's `peer.json`; None when it is not installed."""
    mark = folder / name / MARK
    return json.loads(mark.read_text()) if mark.exists() else None


def environment(target: Path) -> str:
    """Creates a virtual environment. Returns the path of its Python. Raises SetupError."""
    run(target, [sys.executable, "-m", "venv", str(target / "venv")])
    return str(target / "venv" / "bin" / "python")


def pip(target: Path, python: str, *arguments: str) -> None:
    """Runs pip. Raises SetupError."""
    run(target, [python, "-m", "pip", "--disable-pip-version-check", *arguments])


def run(target: Path, command: list[str]) -> None:
    """Runs a command with output to the target's log.

    Raises:
        SetupError: with the last line of the log that has `error`, else with the exit code; or because the program
            cannot be started.
    """
    log = target / "setup.log"
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        try:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        except OSError as error:
            raise SetupError(f"{command[0]}: {error.strerror}") from None
    if code != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        raise SetupError((lines or [f"exit code {code}"])[-1].strip())


def version(python: str, distribution: str) -> str:
    """The version of a distribution in another environment."""
    program = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
