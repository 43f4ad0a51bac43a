"""Holds of requests whose gateway died and left their usage in its spool: kept open until the ledger has the usage.

Who takes over a spool takes over the holds of what is in it, before their leases run out. So the usage stays protected
from being spent again however long the ledger is away, and a retry under the request's idempotency key is not let in
before its reply can be found.
"""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.gateway.ports import LimiterClient
from serve_app.ledger.messages import Settled, Settlement, SettlementRejected
from serve_app.limits.messages import OpenHold, Release


class Adoption:
    """The settlements of dead gateways that this one is about to settle."""

    def __init__(self, leases: LimiterClient) -> None:
        self._leases = leases
        self._unsettled: dict[str, Settlement] = {}

    def take(self, found: Iterable[Settlement]) -> None:
        """Keeps their holds alive from here on. What the limiter still holds stays as it is, but for the holder."""
        new = {one.request_id: one for one in found}
        self._unsettled |= new
        self._leases.adopt([_hold(one) for one in new.values()])

    def settled(self, answers: Iterable[Settled | SettlementRejected]) -> None:
        """Releases those of them that the ledger has taken, or will never take."""
        for answer in answers:
            settlement = self._unsettled.pop(answer.request_id, None)
            if settlement is not None:
                self._leases.release(_release(settlement, answer if isinstance(answer, Settled) else None))


def _hold(settlement: Settlement) -> OpenHold:
    price, reply = settlement.price, settlement.reply
    tokens = settlement.prompt_tokens, settlement.cached_tokens, settlement.completion_tokens
    return OpenHold(
        request_id=settlement.request_id,
        account_id=settlement.account_id,
        key_id=settlement.key_id,
        hold=price.charge(*tokens),
        tokens_charged=settlement.prompt_tokens + settlement.completion_tokens,
        prompt_price=max(price.input, price.cached_input),
        output_price=price.output,
        max_tokens=settlement.completion_tokens,
        backend=settlement.backend,
        idempotency_key=None if reply is None else reply.idempotency_key,
    )


def _release(settlement: Settlement, settled: Settled | None) -> Release:
    return Release(
        request_id=settlement.request_id,
        prompt_tokens=settlement.prompt_tokens,
        completion_tokens=settlement.completion_tokens,
        balance=settled.balance if settled else None,
        version=settled.version if settled else None,
        account_id=settlement.account_id,
        key_id=settlement.key_id,
        key_spent=settled.key_spent if settled else None,
        key_period=settled.key_period if settled else None,
    )
