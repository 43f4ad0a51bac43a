"""Common steps of the recharging tests: turn it on, let the watcher look, read what the ledger has."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app.console.recharger import Recharger
from serve_app.contracts.recharges import AskMethod, Attempt, Recharge, SetRecharge, ShowRecharge

from .conftest import House, send
from .stripe_stand_in import StandIn, event

UNIT = 10**9


def recharger(house: House) -> Recharger:
    assert house.console.payments is not None
    return Recharger(house.console.books, house.console.payments)


def turn(house: House) -> None:
    """As one process does every five seconds."""
    asyncio.run(recharger(house).turn())


def saved(house: House, setup_id: str | None, **changed: Any) -> str:
    session = {
        "id": "cs_2", "object": "checkout.session", "mode": "setup", "payment_status": "no_payment_required",
        "client_reference_id": house.account_id, "customer": "cus_1", "setup_intent": "seti_1",
        "metadata": {"account_id": house.account_id, "setup_id": setup_id},
    } | changed  # fmt: skip
    return event("checkout.session.completed", session)


def succeeded(api: StandIn, payment_id: str = "pi_1") -> str:
    return event("payment_intent.succeeded", api.payments[payment_id] | {"status": "succeeded"})


def shown(house: House) -> tuple[Recharge, list[Attempt]]:
    recharge, attempts = house.ledger.run(ShowRecharge(house.account_id))
    assert recharge is not None
    return recharge, attempts


def turn_on(house: House, *, threshold: int = 10, amount: int = 25, cap: int = 100) -> None:
    """The account has 5: it is to be recharged at once."""
    run = house.ledger.run
    run(SetRecharge(house.account_id, threshold * UNIT, amount * UNIT, cap * UNIT))
    assert send(house, saved(house, run(AskMethod(house.account_id)).setup_id)).status_code == 200


def states(house: House) -> list[str]:
    return [attempt.state for attempt in shown(house)[1]]


def path(house: House) -> str:
    return f"/console/accounts/{house.account_id}/billing"
