"""After an outage the spool and live settlements take turns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.books import Settled, Settlement, SettlementRejected
from serve_app.contracts.errors import LedgerError, LedgerUnavailable
from serve_app.gateway.settlements import REPLAY_BATCH, Settlements
from serve_app.storage.spool import Spool

from .books import COST, Books

MISSED = 4 * REPLAY_BATCH
CLIENTS = 8


class Port:
    """AccountingPort in this process."""

    def __init__(self, service: AccountingService) -> None:
        self._service = service

    async def settle(self, batch: list[Settlement]) -> Any:
        return await self._service.settle(batch)

    async def run(self, command: Any) -> Any:
        answer = await self._service.run(command)
        if isinstance(answer, LedgerError):
            raise answer
        return answer


class Nothing:
    """Metrics and a LimiterClient that do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


async def test_after_an_outage_live_settlements_and_the_spool_take_turns(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = books.ledger.settle
    is_away = True
    commits: list[set[str]] = []  # the request ids of each

    def settle(batch: Sequence[Settlement]) -> list[Settled | SettlementRejected]:
        if is_away:
            raise LedgerUnavailable("no answer")
        commits.append({settlement.request_id for settlement in batch})
        return real(batch)

    monkeypatch.setattr(books.ledger, "settle", settle)
    service = AccountingService(books.ledger)
    anything: Any = Nothing()
    spool = Spool(tmp_path / "spool", "gateway")
    gateway = Settlements(AccountingShards([Port(service)]), spool, anything, anything, settle_timeout_s=0.2)
    gateway.start()
    missed = {f"missed{number}" for number in range(MISSED)}
    await asyncio.gather(*(gateway.settle(books.settlement(request_id)) for request_id in sorted(missed)))
    assert spool.waiting == MISSED
    gateway.settle_timeout_s = 60
    is_away = False

    waited: list[int] = []  # commits from the asking for a live settlement to its own

    names = (f"live{number}" for number in itertools.count())

    async def client() -> None:
        """One live settlement after the other until the spool is empty."""
        while spool.waiting or not waited:
            begun, name = len(commits), next(names)
            if await gateway.settle(books.settlement(name)):  # None: in the spool, until the ledger has answered
                waited.append(next(n for n, commit in enumerate(commits[begun:], 1) if name in commit))

    async with asyncio.timeout(300):
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    await gateway.stop()
    await service.close()

    # Its own commit, the one under way when it was asked, and one batch of the spool.
    assert max(waited) <= 3
    with_missed = [commit for commit in commits if commit & missed]
    assert set().union(*with_missed) >= missed
    # Each batch of the spool is one commit, or two when live settlements take a part of it.
    assert len(with_missed) <= 2 * MISSED / REPLAY_BATCH
    settled = sum(len(commit) for commit in commits)
    assert books.ledger.account_totals(books.account_id).requests == settled
    assert books.account.balance == 10**12 - COST * settled
    assert books.ledger.check().ok
