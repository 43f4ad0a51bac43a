"""Measures a ledger of many requests: `python -m bench.ledger_size URL --requests 1000000` on an empty PostgreSQL.

The measurements, in this order:
- settlements per second on the empty ledger and on the full one,
- a full check and a check from the last checkpoint, both while another thread settles,
- queries of usage,
- archiving the first month while another thread settles.
SQL statements write the requests as settlements would have done, which the full check verifies. The requests span three
months that end today. With `--pages`, only the console's pages for one account are measured on the full ledger. All
accounts share the requests equally, so with `--accounts 1` this account has all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from serve_app.accounting.archive import archive_months
from serve_app.accounting.database import Database
from serve_app.accounting.ledger import Ledger
from serve_app.console.app import build_console
from serve_app.console.web import Console
from serve_app.contracts import key_format as keys
from serve_app.contracts.books import Outcome, Settled, Settlement
from serve_app.contracts.commands import AddCredit, CheckBooks, Command, CreateKey, ListUsage, OpenAccount, SumUsage
from serve_app.contracts.key_format import digest
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.limits import Contract
from serve_app.contracts.money import Price
from serve_app.contracts.people import InvitePerson

PRICE = Price(270, 70, 1100)
PAGES = ("", "/usage", "/usage?span=90+days&by=key", "/usage?span=24+hours", "/requests", "/billing")
DAYS = 92
BATCH = 500_000

# Every 50th request failed and cost nothing. `base` is the number of the last journal entry before the fill.
FILL = """
CREATE TEMP TABLE made ON COMMIT DROP AS
SELECT n, owners.*, %(begin)s + n * %(step)s AS at, CASE WHEN n %% 3 = 0 THEN 'svc-coder' ELSE 'svc-chat' END AS model,
    100 + n %% 1900 AS prompt, n %% 100 AS cached, 20 + n %% 380 AS completion,
    n %% 50 = 0 AS failed, CASE WHEN n %% 50 <> 0 THEN %(base)s + n - n / 50 END AS entry_id
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n JOIN owners ON owners.place = n %% %(accounts)s;
ALTER TABLE made ADD COLUMN cost bigint;
UPDATE made SET cost = CASE WHEN failed THEN 0 ELSE (prompt - cached) * 270 + cached * 70 + completion * 1100 END;
INSERT INTO journal_entries (id, kind, account_id, memo, created_at)
SELECT entry_id, 'charge', account_id, request, at FROM made, LATERAL (SELECT {id} AS request) AS ids
WHERE NOT failed ORDER BY n;
INSERT INTO postings (entry_id, line, ledger_account, amount)
SELECT entry_id, line, CASE line WHEN 1 THEN 'customer:' || account_id || ':topped_up' ELSE 'revenue:' || model END,
    CASE line WHEN 1 THEN -cost ELSE cost END
FROM made, generate_series(1, 2) AS line WHERE NOT failed ORDER BY n, line;
INSERT INTO usage (request_id, account_id, key_id, model, backend, price_version, day, prompt_tokens, cached_tokens,
    completion_tokens, charged, uncollected, outcome, started_at, finished_at, settled_at, entry_id, number)
SELECT {id}, account_id, key_id, model, 'bench', price_versions.id,
    to_char(to_timestamp(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD'), prompt, cached, completion, cost, 0,
    CASE WHEN failed THEN 'failed' ELSE 'completed' END, at - 2, at, at, entry_id,
    CASE WHEN failed THEN nextval('usage_number') END
FROM made JOIN price_versions USING (model) ORDER BY n;
INSERT INTO usage_daily (account_id, day, key_id, model, requests, prompt_tokens, cached_tokens, completion_tokens,
    charged, uncollected)
SELECT account_id, to_char(to_timestamp(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD') AS day, key_id, model, count(*),
    sum(prompt), sum(cached), sum(completion), sum(cost), 0 FROM made GROUP BY account_id, day, key_id, model
ON CONFLICT (account_id, day, key_id, model) DO UPDATE SET requests = usage_daily.requests + excluded.requests,
    prompt_tokens = usage_daily.prompt_tokens + excluded.prompt_tokens,
    cached_tokens = usage_daily.cached_tokens + excluded.cached_tokens,
    completion_tokens = usage_daily.completion_tokens + excluded.completion_tokens,
    charged = usage_daily.charged + excluded.charged;
UPDATE accounts SET topped_up = topped_up - spent.cost
FROM (SELECT account_id, sum(cost) AS cost FROM made GROUP BY account_id) AS spent WHERE id = spent.account_id;
UPDATE ledger_head SET entry = (SELECT coalesce(max(entry_id), entry) FROM made);
""".replace("{id}", "'chatcmpl-' || lpad(to_hex((at * 1000)::bigint), 12, '0') || substr(md5(n::text), 1, 20)")


class World:
    def __init__(self, ledger: Ledger, accounts: int) -> None:
        self.ledger = ledger
        self.accounts = accounts
        self.run = uuid.uuid4().hex
        self.numbers = itertools.count()
        self.owners: list[tuple[str, str]] = []
        for number in range(accounts):
            account_id = ledger.run(OpenAccount(f"bench {number}")).account_id
            ledger.run(AddCredit(account_id, 10**15))
            key = keys.new_key()
            stored = ledger.run(CreateKey(account_id, "bench", keys.digest(key), keys.hint(key)))
            self.owners.append((account_id, stored.key_id))

    def settlement(self) -> Settlement:
        number, now = next(self.numbers), time.time()
        account_id, key_id = self.owners[number * 7 % self.accounts]
        model = "svc-chat" if number % 3 else "svc-coder"
        request_id = f"chatcmpl-{int(now * 1000):012x}{uuid.uuid4().hex[:20]}"
        return Settlement(
            request_id, account_id, key_id, model, "bench", PRICE, 900, 300, 200, Outcome.COMPLETED, now - 2, now
        )

    def rate(self, seconds: float, batch: int = 64) -> float:
        """Measures settlements per second in one thread."""
        settled, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            assert all(isinstance(one, Settled) for one in self.ledger.settle(self.some(batch)))
            settled += batch
        return settled / (time.perf_counter() - began)

    def some(self, batch: int) -> list[Settlement]:
        return [self.settlement() for _ in range(batch)]

    @contextmanager
    def settling(self, per_second: float, waits: list[float]) -> Iterator[None]:
        """A thread settles at this rate while the body runs, 10 at a time. `waits` gets the seconds of each batch."""
        ended = threading.Event()

        def settle() -> None:
            due = time.perf_counter()
            while not ended.is_set():
                began = time.perf_counter()
                self.ledger.settle(self.some(10))
                waits.append(time.perf_counter() - began)
                due = max(due + 10 / per_second, time.perf_counter() - 1)
                time.sleep(max(0.0, due - time.perf_counter()))

        thread = threading.Thread(target=settle)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def fill(self, url: str, requests: int) -> None:
        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            connection.execute("SET session_replication_role = replica")  # without checks of foreign keys
            connection.execute("CREATE TEMP TABLE owners (place bigint, account_id text, key_id text)")
            with connection.cursor().copy("COPY owners FROM STDIN") as copy:
                for place, (account_id, key_id) in enumerate(self.owners):
                    copy.write_row((place, account_id, key_id))
            (base,) = connection.execute("SELECT entry FROM ledger_head").fetchone() or (0,)
            end = time.time() - 60
            times = {"begin": end - DAYS * 86400.0, "step": DAYS * 86400.0 / requests}
            connection.commit()
            for first in range(1, requests + 1, BATCH):
                last = min(first + BATCH - 1, requests)
                values = {"first": first, "last": last, "accounts": self.accounts, "base": base} | times
                for statement in FILL.split(";\n"):
                    if statement.strip():
                        names = {name: value for name, value in values.items() if f"%({name})s" in statement}
                        connection.execute(statement, names or None) if names else connection.execute(statement)
                connection.commit()
                print(f"{last:,} of {requests:,} requests written", flush=True)
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")


def check(ledger: Ledger, *, full: bool) -> dict[str, Any]:
    steps, wanted, began, problems = 0, CheckBooks(full=full), time.perf_counter(), 0
    while True:
        report = ledger.run(wanted)
        steps, problems = steps + 1, problems + len(report.differences)
        if report.next is None:
            break
        wanted = replace(wanted, after=report.next)
    seconds = round(time.perf_counter() - began, 2)
    return {"seconds": seconds, "usage_rows": report.usage_rows, "calls": steps, "problems": problems}


def archive(url: str, world: World, per_second: float) -> dict[str, Any]:
    """Archives the first month, which may be incomplete, while another thread settles."""
    month = datetime.fromtimestamp(time.time() - (DAYS - 31) * 86400.0, UTC).strftime("%Y-%m")
    waits: list[float] = []
    database, began = Database(url), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, world.settling(per_second, waits):
        made = archive_months(database, month, Path(folder) / "archive", time.time(), lambda _: None)
        seconds = round(time.perf_counter() - began, 1)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.gz"))
    database.close()
    waits.sort()
    p99 = round(1000 * waits[len(waits) * 99 // 100], 1)
    return {"usage_rows": made["usage_rows"], "seconds": seconds, "MB": size // 10**6, "settlement p99, ms": p99}


def pages(world: World) -> dict[str, float]:
    """Milliseconds from the request for a page to its last byte, by page."""
    ledger, account_id = world.ledger, world.owners[0][0]

    class Port:
        async def run(self, command: Command[Any]) -> Any:
            return await asyncio.to_thread(ledger.run, command)

    async def nothing() -> Any:
        return []

    async def status_of(account_id: str) -> AccountStatus:
        return AccountStatus(account_id, 0, 0, Contract())

    console = Console(Port(), b"bench", nothing, nothing, status_of)
    token, expires_at = digest("bench"), time.time() + 3600
    ledger.run(InvitePerson(account_id, f"{uuid.uuid4().hex}@example.org", "owner", token, expires_at))
    app = Starlette(routes=[Mount("/console", build_console(console))])
    with TestClient(app, base_url="https://console.test") as browser:
        form = browser.get("/console/invitations/bench").text
        fields = {"csrf": form.split('name="csrf" value="')[1][:64], "name": "B", "new_password": uuid.uuid4().hex}
        browser.post("/console/invitations/bench", data=fields).raise_for_status()

        def load(page: str) -> float:
            return took(lambda: browser.get(f"/console/accounts/{account_id}{page}").raise_for_status())

        return {page or "/": load(page) for page in PAGES}


def took(action: Any) -> float:
    """Median of five runs, in milliseconds."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        action()
        times.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(times), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=8.0, help="to measure each rate; default: 8")
    parser.add_argument("--accounts", type=int, default=1000, help="accounts that share the requests; default: 1000")
    parser.add_argument("--pages", action="store_true", help="on the full ledger, measure only the console's pages")
    parser.add_argument("--per-second", type=float, default=300.0, help="settlements during the checks; default: 300")
    options = parser.parse_args()
    found: dict[str, Any] = {"requests": options.requests}

    def report(name: str, value: Any) -> None:
        found[name] = value
        print(f"{name}: {value}", flush=True)

    with Ledger(options.url) as ledger:
        world = World(ledger, options.accounts)
        world.rate(2)
        report("settlements/s, empty", round(world.rate(options.seconds)))
        began = time.perf_counter()
        world.fill(options.url, options.requests)
        report("fill, s", round(time.perf_counter() - began, 1))
        if options.pages:
            report("pages, ms", pages(world))
            return
        world.rate(2)
        report("settlements/s, full", round(world.rate(options.seconds)))
        for name, full in (("full check", True), ("check from the checkpoint", False)):
            waits: list[float] = []
            with world.settling(options.per_second, waits):
                if not full:
                    time.sleep(5)
                report(name, check(ledger, full=full))
            waits.sort()
            report(f"{name}: settlement p50, p99, p99.99 in ms", [
                round(1000 * waits[int(len(waits) * part)], 1) for part in (0.5, 0.99, 0.9999)
            ])  # fmt: skip
        account_id = world.owners[7 % options.accounts][0]
        report("usage of an account by day, ms", took(lambda: ledger.run(SumUsage(account_id, group_by=("day",)))))
        report("page of an account's requests, ms", took(lambda: ledger.run(ListUsage(account_id, limit=1000))))
        today = datetime.now(UTC).date().isoformat()
        everyone = SumUsage(day_from=today, group_by=("model",))
        report("usage of all accounts on one day, ms", took(lambda: ledger.run(everyone)))
        report("usage of all accounts by model, ms", took(lambda: ledger.run(SumUsage(group_by=("model",)))))
        report("archive of the first month", archive(options.url, world, options.per_second))
        report("full check after the archive", check(ledger, full=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
