"""`requests list` against the service itself."""

from __future__ import annotations

import time

import pytest

from serve_app.cli.__main__ import main
from serve_app.contracts.books import Outcome
from tests.accounting.books import Books

from .conftest import Run
from .fake_service import FakeService
from .real_service import RealService
from .terminal import terminal

IDS = [f"chatcmpl-{number:024}" for number in range(5)]


@pytest.fixture
def books(real: RealService) -> Books:
    """An account with five requests in the last five minutes, of which the last failed."""
    books = Books(real.world.ledger, name="Ada")
    now = time.time()
    books.ledger.settle(
        [
            books.settlement(
                request_id, started_at=now - 60 * (5 - number) - 2.5, finished_at=now - 60 * (5 - number),
                outcome=Outcome.FAILED if number == 4 else Outcome.COMPLETED,
            )
            for number, request_id in enumerate(IDS)
        ]
    )  # fmt: skip
    return books


def test_the_newest_requests_come_first_and_the_next_page_is_named(
    real: RealService, run: Run, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run("requests", "list", "--account", books.account_id, "--limit", 3)
    lines = first.out.splitlines()
    assert lines[0].split() == ["request", "ended", "status", "charged", "model"]
    assert [line.split()[0] for line in lines[1:4]] == IDS[:1:-1]
    assert (lines[1].split()[-3], lines[2].split()[-3]) == ("failed", "completed")
    following = lines[-1].removeprefix("Next page: serve-app ").replace("'", "").split()
    assert run(*following, "-o", "name").out.split() == IDS[1::-1]
    with terminal(monkeypatch) as screen, pytest.raises(SystemExit):
        main(["requests", "list"])
    assert [line.split()[0] for line in screen.lines[1:6]] == IDS[::-1]
    assert max(map(len, screen.lines)) <= 80


def test_filters_of_time_status_model_key_and_tag(real: RealService, run: Run, books: Books) -> None:
    def names(*options: object) -> list[str]:
        return run("requests", "list", *options, "-o", "name").out.split()

    assert names("--status", "failed") == IDS[4:]
    assert names("--key", books.key_id, "--since", "150min") == IDS[::-1]
    assert names("--to", "2026-01-01") == names("--model", "svc-none") == names("--tag", "ci") == []
    row = run("requests", "list", "--status", "failed", "--json").json["data"][0]
    assert (row["request_id"], row["outcome"]) == (IDS[4], "failed")
    assert "2.5" in run("requests", "list", "--limit", 1, "-o", "wide").out.splitlines()[1].split()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--status", "served"], "must be one of completed, cancelled, failed"),
        (["--since", "yesterday"], "write it like 30min, 12h, 7d or 4w"),
        (["--since", "1h", "--from", "2026-11-01"], "cannot be combined"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_a_wrong_filter_is_refused_before_anything_is_sent(
    service: FakeService, run: Run, options: list[str], says: str
) -> None:
    refused = run("requests", "list", *options)
    assert refused.code == 2
    assert says in refused.error_line
    assert service.requests == []


def test_no_requests_are_reported(real: RealService, run: Run) -> None:
    assert run("requests", "list").out == "No requests match.\n"
