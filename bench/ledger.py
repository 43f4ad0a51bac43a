"""Settlements per second: `python -m bench.ledger URL [seconds]` on an empty or scratch ledger database.

Batches of 1, 16 and 64 settled by one thread, then by 64 threads through the group committer, for 10 accounts; then
batches again with a grant that expires on each account and a budget on each key, the dearest kind of settlement.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from serve_app.ledger import Ledger, Outcome, Price, Settled, Settlement, keys
from serve_app.ledger.group_commit import GroupCommitter


def main(url: str, seconds: float = 3.0) -> None:
    run = uuid.uuid4().hex
    numbers = itertools.count()
    with Ledger(url) as ledger:
        owners = []
        for number in range(10):
            account = ledger.create_account(f"bench {number}")
            ledger.credit(account.account_id, 10**15)
            key = keys.new_key()
            stored = ledger.create_key(account.account_id, "bench", keys.digest(key, "bench"), keys.hint(key))
            owners.append((account.account_id, stored.key_id))

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
        committer = GroupCommitter(ledger.settle)
        waits: list[float] = []
        until = time.perf_counter() + seconds
        lock = threading.Lock()

        def client() -> None:
            while (began := time.perf_counter()) < until:
                with lock:
                    one = settlement()
                committer.submit(one).result()
                waits.append(time.perf_counter() - began)

        for clients in (1, 64):
            waits.clear()
            until = time.perf_counter() + seconds
            with ThreadPoolExecutor(clients) as pool:
                for future in [pool.submit(client) for _ in range(clients)]:
                    future.result()
            waits.sort()
            print(
                f"{clients:3} clients, group commit: {len(waits) / seconds:8.0f} settlements/s, "
                f"median {1000 * waits[len(waits) // 2]:.1f} ms, p99 {1000 * waits[len(waits) * 99 // 100]:.1f} ms",
                flush=True,
            )
        committer.close()
        for account_id, key_id in owners:
            ledger.credit(account_id, 10**15, "grant", expires_at=time.time() + 3600)
            ledger.update_key(key_id, budget=10**17, budget_period="day")
        batches("with grants and budgets, batch")
        began = time.perf_counter()
        report = ledger.check()
        print(f"check of {report.usage_rows} usage rows: {time.perf_counter() - began:.1f} s, ok: {report.ok}")


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
