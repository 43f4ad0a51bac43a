"""A replica counts the tokens that it would bill, and turns text into tokens and back, by the model's tokenizer."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from serve_app.contracts.generation import (
    Bill,
    GenerateCall,
    Rejected,
    Rejection,
    SamplingParams,
    Started,
    TokenizeCall,
    Tokenized,
)
from serve_app.contracts.money import Price
from serve_app.engine.loading.loader import LoadedModel
from serve_app.model.replica import SHORT, Replica
from tests.model.test_replica import Made

pytestmark = pytest.mark.asyncio(loop_scope="session")  # the engine compiles grammars for one loop

BILL = Bill("acct", "key", "svc-chat", "local", Price(input=1000, cached_input=500, output=3000))
USER = {"role": "user", "content": "Grüße aus 北京, and <|im_end|> is text."}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
PROMPTS: dict[str, dict[str, Any]] = {
    "one message": {"messages": (USER,)},
    "system": {"messages": ({"role": "system", "content": "Be brief."}, USER)},
    "prefix": {"messages": (USER, {"role": "assistant", "content": "The"}), "continue_final": True},
    "tools": {"messages": (USER,), "tools": (TOOL,), "tool_choice": "auto"},
    "tools that are not called": {"messages": (USER,), "tools": (TOOL,), "tool_choice": "none"},
    "one function": {"messages": (USER,), "tools": (TOOL,), "tool_choice": "required", "function": "look"},
    "results": {
        "messages": (USER, CALLED, {"role": "tool", "content": "5", "tool_call_id": "c1"}),
        "tools": (TOOL,),
        "tool_choice": "auto",
    },
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
async def test_a_count_is_what_the_same_conversation_is_billed_for(replica: Replica, prompt: dict[str, Any]) -> None:
    tokenized = await replica.tokenize(TokenizeCall("acct", **prompt))
    assert isinstance(tokenized, Tokenized)
    assert tokenized.count == len(tokenized.token_ids)
    assert await replica.tokenize(TokenizeCall("acct", **prompt, only_count=True)) == Tokenized(tokenized.count)
    call = GenerateCall("r", sampling=SamplingParams(1), credit=10**12, bill=BILL, **prompt)
    [started, *_, finished] = [event async for event in replica.generate(call)]
    assert isinstance(started, Started)
    assert started.prompt_tokens == finished.prompt_tokens == tokenized.count  # type: ignore[union-attr]


async def test_the_beginning_of_the_assistants_turn_can_be_left_out(replica: Replica, tiny: LoadedModel) -> None:
    call = TokenizeCall("acct", messages=(USER,))
    whole, without = [await replica.tokenize(replace(call, add_generation_prompt=yes)) for yes in (True, False)]
    assert isinstance(whole, Tokenized)
    assert isinstance(without, Tokenized)
    assert whole.token_ids[: without.count] == without.token_ids
    assert tiny.tokenizer.decode(whole.token_ids[without.count :]) == "<|im_start|>assistant\n"


async def test_a_text_has_the_tokenizers_own_ids_and_names_and_comes_back(replica: Replica, tiny: LoadedModel) -> None:
    text = "Grüße, 北京<|im_end|>\n"
    tokenized = await replica.tokenize(TokenizeCall("acct", text=text, with_names=True))
    assert isinstance(tokenized, Tokenized)
    assert list(tokenized.token_ids) == tiny.tokenizer.encode(text)
    assert list(tokenized.names) == tiny.tokenizer.convert_ids_to_tokens(tokenized.token_ids)
    assert "<|im_end|>" in tokenized.names
    back = await replica.tokenize(TokenizeCall("acct", token_ids=tokenized.token_ids))
    assert back == Tokenized(tokenized.count, text=text)


@pytest.mark.parametrize("token", [-1, 49152, 2**31 - 1])
async def test_an_id_that_is_no_token_is_refused_and_named(replica: Replica, token: int) -> None:
    rejected = await replica.tokenize(TokenizeCall("acct", token_ids=(1, token)))
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.param) == (Rejection.INVALID, "tokens")
    assert str(token) in rejected.message


async def test_a_text_that_no_context_holds_is_refused_without_being_counted(replica: Replica) -> None:
    rejected = await replica.tokenize(TokenizeCall("acct", text="x" * 4_000_000))
    assert rejected == Rejected(Rejection.CONTEXT, limit=32768)


async def test_a_template_that_refuses_the_messages_says_so() -> None:
    rejected = await Made().replica.tokenize(TokenizeCall("acct", messages=({"role": "user", "content": "refused"},)))
    assert rejected == Rejected(Rejection.INVALID, message="roles must alternate", param="messages")


@pytest.mark.parametrize("what", [{"text": "x" * (SHORT + 1)}, {"token_ids": (0,) * (SHORT + 1)}], ids=["text", "ids"])
async def test_long_work_of_an_account_waits_for_its_own_alone(what: dict[str, Any]) -> None:
    made, gate, begun = Made(), threading.Event(), 0

    def wait(*_: object) -> Any:
        nonlocal begun
        begun += 1
        assert gate.wait(60)
        return []

    made.engine.encode = made.engine.decode = wait  # type: ignore[attr-defined]
    first, second = (asyncio.create_task(made.replica.tokenize(TokenizeCall("a", **what))) for _ in range(2))
    while not begun:
        await asyncio.sleep(0.001)
    # Another account's long prompt, short texts, and prompts of replies do not wait.
    long_prompt = ({"role": "user", "content": "x" * 50},)
    made.replica._tokenizing.submit(lambda: None).result(60)
    assert await made.replica.tokenize(TokenizeCall("b", messages=long_prompt, only_count=True)) == Tokenized(50)
    assert begun == 1
    gate.set()
    await asyncio.gather(first, second)
    assert begun == 2


async def test_after_a_long_prompt_an_accounts_next_one_waits_three_times_as_long() -> None:
    made, now = Made(), iter([0.0, 0.02])
    made.replica._aside._clock = lambda: next(now)
    loop, asked = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later
    loop.call_later = lambda delay, *args, **more: asked.append(delay) or call_later(0, *args, **more)  # type: ignore[method-assign]
    try:
        await made.all(content="x" * (SHORT + 1))
        while not asked:
            await asyncio.sleep(0.001)
    finally:
        loop.call_later = call_later  # type: ignore[method-assign]
    assert asked == [pytest.approx(0.06)]
