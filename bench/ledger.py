"""Measures settlements per second: `python -m bench.ledger URL [seconds]` on an empty or scratch ledger database.

For 10 accounts, one thread settles batches of 1, 16 and 64. Then 1 and 64 clients settle through an accounting service.
The batches run again with the most expensive settlements: each account has an expiring grant, and each key a budget.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
import uuid
from collections.abc import Callable

from serve_app.accounting.accounting_service import AccountingService
from serve_app.accounting.ledger import Ledger
from serve_app.contracts import key_format as keys
from serve_app.contracts.books import Outcome, Settled, Settlement
from serve_app.contracts.commands import AddCredit, CheckBooks, CreateKey, OpenAccount, UpdateKey
from serve_app.contracts.money import Price


def main(url: str, seconds: float = 3.0) -> None:
    run = uuid.uuid4().hex
    numbers = itertools.count()
    with Ledger(url) as ledger:
        owners = []
        for number in range(10):
            account_id = ledger.run(OpenAccount(f"bench {number}")).account_id
            ledger.run(AddCredit(account_id, 10**15))
            key = keys.new_key()
            stored = ledger.run(CreateKey(account_id, "bench", keys.digest(key), keys.hint(key)))
            owners.append((account_id, stored.key_id))

        def settlement() -> Settlement:
            number = next(numbers)
            account_id, key_id = owners[number % 10]
            now = time.time()
            price = Price(270, 70, 1100)
            return Settlement(
                f"{run}-{number}", account_id, key_id, "svc-chat", "bench", price, 900, 300, 200,
                Outcome.COMPLETED, now - 2, now,
            )  # fmt: skip

        def batches(title: str) -> None:
            for batch in (1, 16, 64):
                settled, began = 0, time.perf_counter()
                while time.perf_counter() - began < seconds:
                    results = ledger.settle([settlement() for _ in range(batch)])
                    assert all(isinstance(one, Settled) for one in results)
                    settled += batch
                rate = settled / (time.perf_counter() - began)
                print(f"{title} of {batch:3}: {rate:8.0f} settlements/s", flush=True)

        batches("batch")
        asyncio.run(_clients(ledger, settlement, seconds))
        for account_id, key_id in owners:
            ledger.run(AddCredit(account_id, 10**15, "grant", expires_at=time.time() + 3600))
            ledger.run(UpdateKey(key_id, {"budget": 10**17, "budget_period": "day"}))
        batches("with grants and budgets, batch")
        began = time.perf_counter()
        report = ledger.run(CheckBooks())
        print(f"check of {report.usage_rows} usage rows: {time.perf_counter() - began:.1f} s, ok: {report.ok}")


async def _clients(ledger: Ledger, settlement: Callable[[], Settlement], seconds: float) -> None:
    """Measures clients of an AccountingService. Each sends one settlement at a time."""
    service = AccountingService(ledger)
    for clients in (1, 64):
        waits: list[float] = []
        until = time.perf_counter() + seconds

        async def client(waits: list[float] = waits, until: float = until) -> None:
            while (began := time.perf_counter()) < until:
                await service.settle([settlement()])
                waits.append(time.perf_counter() - began)

        await asyncio.gather(*(client() for _ in range(clients)))
        waits.sort()
        print(
            f"{clients:3} clients: {len(waits) / seconds:8.0f} settlements/s, "
            f"median {1000 * waits[len(waits) // 2]:.1f} ms, p99 {1000 * waits[len(waits) * 99 // 100]:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
