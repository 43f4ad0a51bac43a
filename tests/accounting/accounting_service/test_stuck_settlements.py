"""A settlement that the ledger refuses is kept, counted and settled on command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.accounting.accounting_service import AccountingService
from serve_app.contracts.books import Audit, Refusal, Settled, Settlement, SettlementRejected, StoredReply
from serve_app.contracts.errors import LedgerUnavailable
from serve_app.contracts.metric import Metric
from tests.accounting.accounting_service.settling import Recorded, until
from tests.accounting.books import COST, Books


async def test_a_settlement_that_fails_unforeseen_is_kept_and_settled_on_command(
    service: AccountingService, books: Books, recorded: Recorded
) -> None:
    def fail(batch: Sequence[Settlement]) -> None:
        if any(settlement.request_id == "cursed" for settlement in batch):
            raise ZeroDivisionError

    recorded.fail = fail
    reply = StoredReply("key", "fingerprint", b"body")
    sent = [books.settlement("good"), books.settlement("cursed", reply=reply)]
    for _ in range(2):  # its gateway repeats it
        good, cursed = await service.settle(sent)
        assert isinstance(good, Settled)
        assert isinstance(cursed, SettlementRejected)
        assert cursed.kept
    [stuck] = books.ledger.stuck()
    assert (stuck.stuck_id, stuck.account_id, stuck.refusal) == ("cursed", books.account_id, Refusal.FAILED)
    assert (stuck.reason, stuck.tries) == ("unexpected error in the ledger: ZeroDivisionError", 2)
    assert stuck.settlement["completion_tokens"] == 4
    assert books.account.balance == 10**12 - COST

    # While the cause is there it stays; then it is settled once.
    [still] = books.ledger.retry_stuck(("cursed", "unknown"))
    assert still.tries == 3
    recorded.fail = lambda batch: None
    assert books.ledger.retry_stuck(("cursed",), Audit("operator")) == []
    assert books.ledger.retry_stuck(("cursed",)) == []
    assert books.ledger.stuck() == []
    assert books.account.balance == 10**12 - 2 * COST
    [record] = books.ledger.audit_log(books.account_id)
    assert (record.action, record.detail) == ("retry_stuck", {"request_id": "cursed"})
    assert books.ledger.check().ok


async def test_what_the_ledger_refuses_for_a_known_reason_is_kept_as_well(
    service: AccountingService, books: Books
) -> None:
    sent = [books.settlement("r1", account_id="acct_none"), books.settlement("r2"), books.settlement("r\x003")]
    first, second, third = await service.settle(sent)
    assert isinstance(first, SettlementRejected)
    assert isinstance(third, SettlementRejected)
    assert (first.refusal, first.kept) == (Refusal.ACCOUNT_NOT_FOUND, True)
    assert (third.refusal, third.kept) == (Refusal.INVALID, True)
    assert isinstance(second, Settled)
    assert {stuck.refusal for stuck in books.ledger.stuck()} == {Refusal.ACCOUNT_NOT_FOUND, Refusal.INVALID}
    assert books.ledger.count_stuck() == 2


async def test_what_can_not_be_kept_either_is_in_the_log(
    service: AccountingService, books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    [refused] = await service.settle([books.settlement("r1", started_at=float("nan"))])
    assert isinstance(refused, SettlementRejected)
    assert not refused.kept
    [record] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "request_id='r1'" in record.getMessage()


async def test_a_ledger_that_can_not_keep_it_now_is_asked_again(
    service: AccountingService, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise LedgerUnavailable("connection lost")

    with monkeypatch.context() as broken:
        broken.setattr(books.ledger, "keep_stuck", away)
        [unknown, good] = await service.settle([books.settlement("r1", account_id="acct_none"), books.settlement("r2")])
        assert isinstance(unknown, LedgerUnavailable)
        assert isinstance(good, Settled)


async def test_the_ledger_says_which_requests_it_does_not_have(service: AccountingService, books: Books) -> None:
    await service.settle([books.settlement("r1"), books.settlement("stuck", account_id="acct_none")])
    assert books.ledger.find_unsettled(("r0", "r1", "stuck", "r2", "r0")) == ["r0", "r2"]


async def test_the_number_of_stuck_settlements_is_a_metric_from_the_start(books: Books) -> None:
    set_to: list[tuple[str, float]] = []

    class Gauges:
        def set(self, gauge: Metric, value: float, *labels: str) -> None:
            set_to.append((gauge.name, value))

    for expected in (0, 1):
        service = AccountingService(books.ledger, metrics=Gauges())  # type: ignore[arg-type]
        service.start()
        await until(lambda: bool(set_to))
        assert set_to == [("serve_app_stuck_settlements", expected)]
        set_to.clear()
        await service.settle([books.settlement("r", account_id="acct_none")])
        await service.close()
