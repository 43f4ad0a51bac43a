"""The operator of docs/guides: what the guides' words stand for here, and what was made so far."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from tests.accounting.books import Books, Ledger
from tests.service.operating import postgres
from tests.service.operating.stage import Done, Stage


def first_of_month(day: datetime, months: int) -> datetime:
    """The first day of the month that is so many months after that of `day`."""
    count = day.year * 12 + day.month - 1 + months
    return datetime(count // 12, count % 12 + 1, 1, tzinfo=UTC)


NOW = datetime.now(UTC)
OPEN = first_of_month(NOW - timedelta(days=35), 0)  # the months before it can be archived
PAST = OPEN - timedelta(days=10)  # when the service had its first requests


class Operator(Stage):
    """A stage, and what the operator has made so far."""

    account_id = key = key_id = grant_id = chat_id = moment = ""
    past: Books
    server: postgres.Server

    def sql(self, statement: str) -> Done:
        return Done(statement, repr(self.server.run(statement, "serve_app")))

    @property
    def ledger_url(self) -> str:
        return f"sqlite:///{self.home / 'ledger.db'}"

    @contextlib.contextmanager
    def ledger(self) -> Iterator[Ledger]:
        with contextlib.closing(Ledger(self.ledger_url, migrate=False)) as opened:
            yield opened

    def account(self) -> dict[str, Any]:
        return self.service.admin("GET", f"/admin/accounts/{self.account_id}")

    def chat(self, key: str = "", **body: Any) -> httpx.Response:
        reply = self.service.chat(key or self.key, max_tokens=2, **body)
        if reply.is_success:
            self.chat_id = reply.json()["id"]
        return reply

    def is_served(self) -> bool:
        """Returns whether a request succeeds. Parts of the service may still be starting."""
        try:
            return self.chat().is_success
        except httpx.HTTPError:
            return False

    def backend(self) -> str:
        """Which one replies."""
        return str(self.chat().json()["system_fingerprint"]).removeprefix("fp_").partition("_")[0]

    def remove_server(self) -> None:
        if hasattr(self, "server"):
            self.server.remove()

    def new_key(self) -> None:
        made = self.service.admin("POST", f"/admin/accounts/{self.account_id}/keys", {"name": "main"})
        self.key, self.key_id = made["key"], made["id"]

    def requests_in_all(self) -> int:
        return sum(int(row["requests"]) for row in self.service.admin("GET", "/admin/usage?group_by=model")["data"])


@contextlib.contextmanager
def at_work(model_path: Path, skipped: Iterable[str]) -> Iterator[Operator]:
    """An operator with an empty folder, and with names for what the document leaves open. Nothing is left of it."""
    with contextlib.ExitStack() as left:
        folder = Path(tempfile.mkdtemp(prefix="op-"))
        left.callback(shutil.rmtree, folder, ignore_errors=True)
        it = Operator(folder, model_path, skipped)
        left.callback(it.remove_server)
        left.callback(it.stop)
        _furnish(it)
        yield it


def _furnish(it: Operator) -> None:
    folder = it.folder
    folder.chmod(0o755)  # PostgreSQL runs as a user of its own
    for name in ("backups", "wal", "lost-machine"):
        (folder / name).mkdir()
    it.places = {
        r"\bACCOUNT_ID\b": lambda: it.account_id,
        r"\bKEY_ID\b": lambda: it.key_id,
        r"\bGRANT_ID\b": lambda: it.grant_id,
        r"\bREQUEST_ID\b": "stuck-1",
        r"\bID\b": lambda: it.chat_id,
        r"\bNAME\b": "Ada",
        r"\bBACKEND\b": "smollm2",
        r"\bN\b": "1000",
        r"\bURL\b": lambda: it.ledger_url,
        r"\bDIR\b": "archive",
        r"--from 2026-11-01 --to 2026-11-30": f"--from {PAST:%Y-%m}-01 --to {PAST:%Y-%m-%d}",
        r"--before 2026-10\b": f"--before {OPEN:%Y-%m}",
        r"--from 2026-01-01": f"--from {PAST:%Y-%m-%d}",
        r"203\.0\.113\.7": "127.0.0.1",
        r"2026-12-31": f"{NOW + timedelta(days=90):%Y-%m-%d}",
        r"/srv/backups": str(folder / "backups"),
        r"/srv/lost-machine": str(folder / "lost-machine"),
        r"/srv/serve-app": str(it.home),
        r"/srv/ledger-wal": str(folder / "wal"),
        r"/srv/ledger-base": str(folder / "base"),
        r"@db\.example\.com/": "@/",  # PGHOST names it
        r"db\.example\.com": lambda: it.server.host,
        r"\bledger_a\b": "ledger",
        r"2026-11-23 14:05:00\+00": lambda: it.moment,
    }
    it.programs.append(str(postgres.PROGRAMS))
