"""`ledger check` asks for step after step and shows its progress; with `--database` it needs no service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from serve_app.accounting.ledger import Ledger
from serve_app.contracts.commands import AddCredit, OpenAccount

from .conftest import Run
from .fake_service import Answer, FakeService

PROBLEM = {"kind": "entry", "subject": "7", "message": "its postings sum to 3"}


def steps(ok: bool, problems: list[Any], following: str | None, done: float) -> Answer:
    counts = {"accounts": 3, "entries": 1234, "usage_rows": 56}
    return Answer(200, {"ok": ok, "problems": problems, "next": following, "done": done, **counts})


def test_a_check_goes_on_to_its_end(service: FakeService, run: Run) -> None:
    service.next.extend([steps(False, [], "a", 0.25), steps(False, [], "b", 0.5), steps(True, [], None, 1.0)])
    checked = run("ledger", "check", "--full")
    assert checked.code == 0
    assert checked.out.startswith("ok: 1,234 journal entries")
    assert checked.err.splitlines() == ["25% checked, 0 problems …", "50% checked, 0 problems …"]
    assert [request.query for request in service.requests] == [
        {"full": "true"}, {"full": "true", "after": "a"}, {"full": "true", "after": "b"},
    ]  # fmt: skip


def test_what_any_step_found_is_reported_once(service: FakeService, run: Run) -> None:
    service.next.extend(
        [steps(False, [PROBLEM], "a", 0.5), steps(False, [PROBLEM], "b", 0.6), steps(True, [], None, 1)]
    )
    checked = run("ledger", "check", "--json")
    assert checked.code == 1
    assert (checked.json["ok"], checked.json["problems"], checked.err) == (False, [PROBLEM], "")


def test_a_ledger_is_checked_without_its_service(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    missing = run("ledger", "check", "--database", url)
    assert (missing.code, "no ledger" in missing.err) == (1, True)
    with Ledger(url, now=lambda: time.time() - 90 * 86400) as ledger:
        account = ledger.run(OpenAccount("Ada")).account_id
        ledger.run(AddCredit(account, 1000))
    checked = run("ledger", "check", "--database", url, "--json")
    assert (checked.code, checked.json["ok"], checked.json["entries"]) == (0, True, 1)

    month = time.strftime("%Y-%m", time.gmtime(time.time() - 33 * 86400))
    where = ["--database", url, "--folder", str(tmp_path / "archive")]
    made = run("ledger", "archive", "--before", month, *where, "--json")
    assert (made.code, made.json["entries"]) == (0, 1)
    assert run("ledger", "check", "--archive", str(tmp_path / "archive"), "--database", url).code == 0
    assert run("ledger", "check", "--archive", str(tmp_path / "archive")).code == 2
    assert run("ledger", "check", "--full", "--database", url).code == 0
    assert run("ledger", "archive", "--before", "x", *where).code == 1
