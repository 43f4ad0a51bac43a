"""`ledger backup` and `ledger restore` find the ledger as the service does, and each failure is one line."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from serve_app.accounting import backup, restore
from serve_app.accounting.database import revisions
from serve_app.accounting.ledger import Ledger
from serve_app.contracts.commands import AddCredit, OpenAccount

from .conftest import Run

SECRET = "postgresql+psycopg://ledger:hunter22@127.0.0.1:1/books"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder with a ledger in it."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("SERVE_APP_HOME", str(folder))
    monkeypatch.delenv("SERVE_APP_DATABASE_URL", raising=False)
    with Ledger(f"sqlite:///{folder}/ledger.db", currency="USD") as ledger:
        ledger.run(AddCredit(ledger.run(OpenAccount("Ada")).account_id, 1_500_000_000))
    return folder


def test_a_ledger_goes_into_a_file_and_back(run: Run, home: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "ledger.backup", tmp_path / "new.db"
    made = run("ledger", "backup", "--to", file)
    assert made.code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    said = {line[:18].strip(): line[18:] for line in made.out.splitlines()}
    assert (said["balances"], said["last settled"], said["accounts"]) == ("1.50 USD", "–", "1")
    size = file.stat().st_size
    assert (said["ledger"], said["saved to"]) == (f"sqlite:///{home}/ledger.db", str(file))
    assert said["size"] == f"{size / 1000:.1f} KB ({size:,} bytes)"
    assert said["schema"].startswith(f"revision {revisions()[-1]}, release ")
    done = run("ledger", "restore", "--from", file, "--database-url", f"sqlite:///{new}", "--json")
    assert (done.code, done.err) == (0, "")
    wanted = {"ok": True, "problems": [], "kind": "sqlite", "balance": "1.50", "last_settled": None}
    assert done.json.items() >= (wanted | {"database": f"sqlite:///{new}"}).items()
    assert done.json["rows"]["accounts"] == 1
    assert run("ledger", "check", "--database", f"sqlite:///{new}").code == 0


def test_the_environment_names_the_ledger(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ledger.backup"
    assert run("ledger", "backup", "--to", file, "--json").json["rows"]["accounts"] == 1
    monkeypatch.setenv("SERVE_APP_DATABASE_URL", f"sqlite:///{tmp_path}/restored.db")
    assert run("ledger", "restore", "--from", file).code == 0
    assert (tmp_path / "restored.db").is_file()


def test_an_older_backup_is_replaced_only_by_a_whole_one(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backups = tmp_path / "backups"
    backups.mkdir()
    file = backups / "ledger.backup"
    assert run("ledger", "backup", "--to", file).code == 0
    old = file.read_bytes()

    def interrupt(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(backup, "_describe", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run("ledger", "backup", "--to", file).code == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in backups.iterdir()] == ["ledger.backup"]
    assert file.read_bytes() == old


def test_a_restore_ends_at_ctrl_c_without_a_ledger(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ledger", "backup", "--to", tmp_path / "ledger.backup").code == 0
    target = tmp_path / "target"
    target.mkdir()

    def interrupt(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(restore, "check_books", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        wanted = f"sqlite:///{target}/ledger.db"
        assert run("ledger", "restore", "--from", tmp_path / "ledger.backup", "--database", wanted).code == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(target.iterdir()) == []


def test_books_that_do_not_add_up_are_restored_and_reported(run: Run, home: Path, tmp_path: Path) -> None:
    from contextlib import closing

    from serve_app.accounting.database import Database

    with closing(Database(f"sqlite:///{home}/ledger.db")) as database, database.aside() as connection:
        connection.exec_driver_sql("UPDATE accounts SET topped_up = 7")
    assert run("ledger", "backup", "--to", tmp_path / "b").code == 0
    done = run("ledger", "restore", "--from", tmp_path / "b", "--database", f"sqlite:///{tmp_path}/new.db", "--json")
    assert (done.code, done.json["ok"], done.json["problems"][0]["kind"]) == (1, False, "balance")
    assert (tmp_path / "new.db").is_file()


@pytest.mark.parametrize("command", ["backup --to {0}/b", "restore --from {0}/made"])
@pytest.mark.parametrize(
    ("url", "last_port"),
    [("https://service.example", 8000), ("http://127.0.0.1:8001", 8000), ("http://127.0.0.1:8001", None)],
)
@pytest.mark.parametrize("how", ["option", "variable", "port"])
def test_with_the_address_of_another_service_nothing_is_saved_or_restored(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    command: str, url: str, last_port: int | None, how: str,
) -> None:  # fmt: skip
    assert run("ledger", "backup", "--to", tmp_path / "made").code == 0
    if command.startswith("restore"):
        (home / "ledger.db").unlink()
    if last_port is not None:
        _last_served(home, last_port)
    options = ["--url", url] if how == "option" else []
    if how != "option":
        monkeypatch.setenv("SERVE_APP_URL" if how == "variable" else "PORT", url if how == "variable" else "8001")
    refused = run("ledger", *command.format(tmp_path).split(), *options)
    assert (refused.code, refused.out) == (2, "")
    assert f"is not known to be the service of {home}" in refused.error_line
    assert "--database" in refused.error_line
    assert not (tmp_path / "b").exists()
    assert (home / "ledger.db").exists() == command.startswith("backup")


def _last_served(home: Path, port: int) -> None:
    (home / "run").mkdir()
    (home / "run" / "config.yaml").write_text(f"http_options: {{host: 127.0.0.1, port: {port}}}\n")


def test_with_the_address_of_the_folders_own_service_its_ledger_is_saved_and_named(
    run: Run, home: Path, tmp_path: Path
) -> None:
    _last_served(home, 8001)
    own = ("--url", "http://127.0.0.1:8001")
    made = run("ledger", "backup", "--to", tmp_path / "b", *own, "--json")
    assert (made.code, made.json["database"]) == (0, f"sqlite:///{home}/ledger.db")
    assert f"sqlite:///{home}/ledger.db" in run("ledger", "backup", "--to", tmp_path / "b", *own).out


def test_a_database_that_is_named_is_saved_whatever_the_address(run: Run, home: Path, tmp_path: Path) -> None:
    other = ("--url", "https://service.example", "--database", f"sqlite:///{home}/ledger.db")
    assert run("ledger", "backup", "--to", tmp_path / "b", *other).code == 0


FAILURES: list[tuple[str, int, str]] = [
    ("backup --to {0}/missing/b", 1, "can't write"),
    ("backup --to {0}", 1, "is a folder"),
    ("backup --to {0}/b --database sqlite:///{0}/none.db", 1, "there is no ledger at"),
    ("backup --to {0}/b --database mysql://x/y", 1, "no ledger on 'mysql'"),
    ("backup --to {0}/b --database hunter22", 2, "must look like"),
    ("backup --to {0}/b --database " + SECRET, 1, "did not answer"),
    ("restore --from {0}/none --database sqlite:///{0}/new.db", 1, "cannot read"),
    ("restore --from {0}/home/ledger.db --database sqlite:///{0}/new.db", 1, "not a complete backup of a ledger"),
    ("restore --from {0}/made", 1, "exists: move ledger.db* away"),
    ("restore --from {0}/made --database " + SECRET, 1, "of a ledger on sqlite, the database is postgresql"),
    ("restore --from {0}/made --database sqlite:///{0}/missing/new.db", 1, "can't write"),
]


def test_each_failure_is_one_line(run: Run, home: Path, tmp_path: Path) -> None:
    assert run("ledger", "backup", "--to", tmp_path / "made").code == 0
    there = sorted(tmp_path.iterdir())
    for command, code, says in FAILURES:
        failed = run("ledger", *command.format(tmp_path).split())
        assert (failed.code, failed.out) == (code, ""), command
        assert says in failed.error_line
        assert "hunter22" not in failed.err, command
        assert sorted(tmp_path.iterdir()) == there, command
