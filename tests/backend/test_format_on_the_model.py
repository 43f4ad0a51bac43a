"""The fields of the chat format on the real bundled model: a call through a replica and a real engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.backend import Bill, GenerateCall, Rejected, Rejection
from serve_app.backend.replica import Replica
from serve_app.engine import Engine
from serve_app.engine.loading.loader import LoadedModel
from serve_app.engine.request import Delta, FinishReason, SamplingParams
from serve_app.ledger.messages import Price, Settlement

MESSAGES = ({"role": "user", "content": "Tell me about the sea."},)
BILL = Bill("acct", "key", "svc-chat", "local", Price(input=1000, cached_input=500, output=3000))


async def no_orphans(settlement: Settlement) -> None:
    raise AssertionError(f"settled by the replica: {settlement}")


@pytest.fixture
def replica(make_engine: Callable[..., Engine]) -> Replica:
    return Replica(make_engine(), no_orphans)


async def ask(
    replica: Replica,
    sampling: SamplingParams,
    messages: tuple[dict[str, Any], ...] = MESSAGES,
    continue_final: bool = False,
) -> list[Any]:
    call = GenerateCall("r", messages, sampling, 10**12, BILL, continue_final)
    return [event async for event in replica.generate(call)]


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


# logit_bias


@pytest.mark.parametrize("token", [49152, 10**9])
async def test_a_bias_for_an_id_outside_the_vocabulary_is_refused_and_named(replica: Replica, token: int) -> None:
    [rejected] = await ask(replica, SamplingParams(4, logit_bias=((5, 1.0), (token, 1.0))))
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.param) == (Rejection.INVALID, "logit_bias")
    assert "vocabulary" in rejected.message


async def test_a_bias_of_100_makes_a_token_certain(replica: Replica, loaded: LoadedModel) -> None:
    [token] = loaded.tokenizer.encode(" sea", add_special_tokens=False)
    events = await ask(replica, SamplingParams(4, seed=1, logit_bias=((token, 100.0),)))
    assert text_of(events) == " sea" * 4
    assert events[-1].reason is FinishReason.LENGTH


async def test_a_bias_of_minus_100_bans_a_token(replica: Replica, loaded: LoadedModel) -> None:
    usual = text_of(await ask(replica, SamplingParams(1, temperature=0.0)))
    [token] = loaded.tokenizer.encode(usual, add_special_tokens=False)
    banned = await ask(replica, SamplingParams(1, temperature=0.0, logit_bias=((token, -100.0),)))
    assert text_of(banned) not in ("", usual)
