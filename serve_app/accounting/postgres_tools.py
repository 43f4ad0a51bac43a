"""Runs PostgreSQL's `pg_dump` and `pg_restore` as processes, and reads or writes their data in chunks.

The password is never on a command line. It is passed in the process's environment, which other users cannot read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

from sqlalchemy.engine import URL

from serve_app.accounting.backup_file import CHUNK
from serve_app.contracts.errors import InvalidValue, LedgerError, ToolMissing


def dump(url: URL, server: str, *, schema: str, snapshot: str) -> Iterator[bytes]:
    """Yields the schema as of a snapshot that another session has exported, in pg_dump's compressed custom format.

    Omits the schema's revision. Raises ToolMissing, and LedgerError if pg_dump fails.
    """
    tool = _tool("pg_dump", server)
    wanted = ("--format=custom", f"--snapshot={snapshot}", f"--schema={schema}")
    revision = f"--exclude-table-data={schema}.alembic_version"
    with _running(url, tool, *wanted, revision, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        output = process.stdout
        assert output is not None
        yield from iter(lambda: output.read(CHUNK), b"")


def load(url: URL, dumped_by: str, *, schema: str, chunks: Iterable[bytes]) -> None:
    """Fills a database in one transaction. Raises ToolMissing, and LedgerError if pg_restore fails."""
    tool = _tool("pg_restore", dumped_by)
    wanted = ("--single-transaction", "--exit-on-error", f"--schema={schema}")
    with _running(url, tool, *wanted, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # pg_restore has failed; its error follows
            for chunk in chunks:
                process.stdin.write(chunk)
            process.stdin.close()


def major(version: str) -> int:
    """Returns the major number of a version as the server and its programs write it. Raises ValueError."""
    if (found := re.search(r"\b(\d+)(?:\.\d+|devel|beta\d|rc\d)", version)) is None:
        raise ValueError(f"no version: {version!r}")
    return int(found[1])


def _tool(name: str, server: str) -> str:
    """Returns the path of a program that is not older than the server. Raises ToolMissing."""
    needed = major(server)
    package = f"install PostgreSQL's client programs (on Debian the package postgresql-client-{needed})"
    if (path := shutil.which(name)) is None:
        raise ToolMissing(f"{name} is not on PATH: {package}")
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    try:
        found = major(output)
    except ValueError:
        raise ToolMissing(f"{path} --version prints no version: {package}") from None
    if found < needed:
        raise ToolMissing(
            f"{path} has version {found}, but the server has {needed}: {package} and put them first on PATH"
        )
    return path


@contextlib.contextmanager
def _running(url: URL, tool: str, *arguments: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process and waits for it, or kills it on an exception. Raises LedgerError if the process fails."""
    from psycopg.conninfo import make_conninfo

    _, parameters = url.get_dialect()().create_connect_args(url)
    parameters = {name: value for name, value in parameters.items() if name != "context"}
    if "sslpassword" in parameters:
        raise InvalidValue("sslpassword would be visible in the list of processes: use a key without a passphrase")
    environment, password = dict(os.environ), parameters.pop("password", None)
    if password is not None:
        environment["PGPASSWORD"] = str(password)
    common = ("--no-owner", "--no-privileges", "--no-password", f"--dbname={make_conninfo(**parameters)}")
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([tool, *arguments, *common], env=environment, stderr=errors, **streams)
        try:
            yield process
            failed = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            process.wait()
        if failed:
            raise LedgerError(f"{os.path.basename(tool)} failed: {_reason(errors, password)}")


def _reason(errors: IO[bytes], password: str | None) -> str:
    """Returns the first output line that names an error."""
    errors.seek(0)
    lines = errors.read(2**16).decode(errors="replace").splitlines()
    line = next((line for line in lines if "error:" in line), lines[0] if lines else "no error message")
    return line.replace(password, "…") if password else line
