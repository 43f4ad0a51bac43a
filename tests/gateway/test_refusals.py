"""Each refusal of the limiter on the wire: status, type, code, param and headers, and that it consumed nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from serve_app.contracts import key_format as keys
from serve_app.contracts.generation import Finished, FinishReason, Rejected, Rejection, Started
from serve_app.contracts.limiting import Refusal, Release, Window
from serve_app.gateway.refusal_errors import refusal_error
from tests.gateway.connections import Call
from tests.gateway.world import World, price, says, settled, until

WINDOWS = Window(10, 0, 6.0), Window(1000, 250, 45.0)
RETRY = {"retry-after", "retry-after-ms"}
RATE = {f"x-ratelimit-{part}-{of}" for part in ("limit", "remaining", "reset") for of in ("requests", "tokens")}


@pytest.mark.parametrize(
    ("refusal", "kind", "param", "headers"),
    [
        (Refusal("r", 401, "invalid_api_key", "m"), "authentication_error", None, {"www-authenticate"}),
        (Refusal("r", 402, "insufficient_balance", "m"), "insufficient_balance", None, set()),
        (Refusal("r", 402, "budget_exceeded", "m"), "insufficient_balance", None, set()),
        (Refusal("r", 403, "address_not_allowed", "m"), "permission_error", None, set()),
        (Refusal("r", 409, "idempotency_in_progress", "m", 1.5), "invalid_request_error", "idempotency-key", RETRY),
        (Refusal("r", 422, "model_not_found", "m"), "invalid_request_error", "model", set()),
        (Refusal("r", 429, "requests", "m", 2.0, *WINDOWS), "rate_limit_error", None, RETRY | RATE),
        (Refusal("r", 429, "concurrency", "m", 2.0), "rate_limit_error", None, RETRY),
        (Refusal("r", 503, "overloaded_error", "m", 2.0), "overloaded_error", None, RETRY),
    ],
    ids=lambda value: f"{value.status} {value.code}" if isinstance(value, Refusal) else "",
)
def test_each_refusal_has_its_row_of_the_table(
    refusal: Refusal, kind: str, param: str | None, headers: set[str]
) -> None:
    error = refusal_error(refusal)
    assert error.status == refusal.status
    assert error.body() == {"error": {"message": "m", "type": kind, "param": param, "code": refusal.code}}
    assert set(error.headers) == headers


def new_key(world: World, **terms: Any) -> tuple[str, str]:
    """A key of the world's account with terms of its own: its id and the key."""
    key = keys.new_key()
    made = world.ledger.create_key(world.account_id, "own", keys.digest(key), keys.hint(key), **terms)
    return made.key_id, key


async def test_a_key_may_ask_for_its_models_alone(world: World) -> None:
    _, key = new_key(world, models=["svc-coder"])
    call = await Call(world, key).done()
    assert (call.status, call.json["error"]["code"], call.json["error"]["param"]) == (422, "model_not_found", "model")
    assert "svc-coder" in call.json["error"]["message"]
    assert (await Call(world, key, model="svc-coder").done()).status == 200
    await settled(world, requests=1, spent=price(10, 2))


async def test_a_key_that_has_expired_is_401(world: World) -> None:
    _, key = new_key(world, expires_at=time.time() + 3600)
    assert (await Call(world, key).done()).status == 200
    world.later_s = 3601
    call = await Call(world, key).done()
    assert (call.status, call.json["error"]["code"]) == (401, "invalid_api_key")
    assert call.headers["www-authenticate"] == "Bearer"


async def test_a_key_over_its_budget_is_402_and_the_account_goes_on(world: World) -> None:
    key_id, key = new_key(world, budget=price(10, 2), budget_period="day")
    assert (await Call(world, key).done()).status == 200
    await until(lambda: world.is_idle)
    released = [ask for ask in world.limiter.asked if isinstance(ask, Release)][-1]
    assert (released.key_id, released.key_spent) == (key_id, price(10, 2))
    assert released.key_period == time.strftime("%Y-%m-%d", time.gmtime())
    call = await Call(world, key).done()
    assert (call.status, call.json["error"]["code"]) == (402, "budget_exceeded")
    assert call.json["error"]["type"] == "insufficient_balance"
    assert (await Call(world).done()).status == 200
    await settled(world, requests=2, spent=2 * price(10, 2))


async def test_a_keys_own_rate_is_429_and_shows_in_the_headers(world: World) -> None:
    _, key = new_key(world, rpm=1)
    assert (await Call(world, key).done()).headers["x-ratelimit-limit-requests"] == "1"
    call = await Call(world, key).done()
    assert (call.status, call.json["error"]["code"]) == (429, "requests")
    assert call.headers["x-ratelimit-limit-requests"] == "1"
    assert call.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(call.headers["retry-after"]) <= 60
    assert (await Call(world).done()).status == 200


# Which refused requests count. The text for clients is `REFUSED_REQUESTS`.

LARGE = Rejected(Rejection.CREDIT, prompt_tokens=10**6)
KEY = {"idempotency-key": "1"}


@pytest.mark.parametrize(
    ("status", "rejected", "fields", "counts"),
    [
        (400, None, {"messages": 1}, 0),
        (422, None, {"top_p": 2}, 0),
        (422, None, {"model": "svc-none"}, 0),
        (402, LARGE, {}, 0),
        (422, Rejected(Rejection.CONTEXT, prompt_tokens=40_000, limit=32768), {}, 1),
        (422, Rejected(Rejection.INVALID, message="no token", param="logit_bias"), {}, 1),
        (422, Rejected(Rejection.ADAPTER), {}, 0),
        (503, Rejected(Rejection.QUEUE_FULL), {}, 0),
        (503, Rejected(Rejection.CLOSED), {}, 0),
        (503, Finished(FinishReason.DEADLINE, 0, 0, 0), {}, 0),
    ],
)
async def test_a_refused_request_counts_only_if_it_needed_the_model_to_be_found_wrong(
    world: World, status: int, rejected: Any, fields: dict[str, Any], counts: int
) -> None:
    world.backends.play(*([[rejected]] if rejected else []), says("x"))
    refused = await Call(world, **fields).done()
    assert refused.status == status
    after = await Call(world).done()
    assert after.headers["x-ratelimit-remaining-requests"] == str(999 - counts)
    await settled(world, requests=1, spent=price(10, 1))


@pytest.mark.parametrize(("limits", "statuses"), [({"credit": 0}, [402, 402]), ({"rpm": 1}, [200, 429, 429])])
async def test_a_request_that_is_not_admitted_counts_against_nothing(
    world: World, limits: dict[str, int], statuses: list[int]
) -> None:
    account_id, key = world.new_account(**limits)
    assert [(await Call(world, key).done()).status for _ in statuses] == statuses
    account = world.limiter.service.admission._accounts[account_id]
    used = [round(sum(bucket.used(world.clock()) for bucket in one)) for one in (account.requests, account.tokens)]
    served = statuses.count(200)
    assert used == [served, served * (10 + 2)]


async def test_a_reused_idempotency_key_and_one_in_progress_count_against_nothing(world: World) -> None:
    gate = asyncio.Event()
    world.backends.play([Started(10, 0), gate, *says("x")[1:]], says("x"))
    first = Call(world, sends=KEY)
    await until(lambda: world.backends.running)
    assert (await Call(world, sends=KEY).done()).status == 409
    gate.set()
    await first.done()
    assert (await Call(world, sends=KEY, max_tokens=7).done()).status == 422
    assert (await Call(world).done()).headers["x-ratelimit-remaining-requests"] == "998"
