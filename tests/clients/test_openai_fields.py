"""Every field of docs/api.md through OpenAI's Python SDK with strict validation: streamed and not."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.served import TOKENS, Served
from tests.clients.ways import OTHER_WAYS, QUESTION, Ask, Choice, asking

SEA = [{"role": "user", "content": "Tell me about the sea."}]
# Fields that common clients send and that have no effect here.
IGNORED: dict[str, Any] = {
    "user": "ada",
    "metadata": {"team": "blue"},
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "verbosity": "low",
    "reasoning_effort": "low",
    "modalities": ["text"],
}
OPTIONAL = (
    "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "n", "presence_penalty", "response_format",
    "stop", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "metadata", "store",
)  # fmt: skip
EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")


def spelled(choice: Choice) -> str:
    """The text of a choice's tokens; an unfinished character at the end is left out, as in a reply."""
    raw = b"".join(bytes(token.bytes or ()) for token in choice.tokens)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


async def test_a_reply_has_an_id_the_model_asked_for_a_fingerprint_and_usage_that_adds_up(ask: Ask) -> None:
    reply = await ask(temperature=0)
    assert reply.content
    assert reply.finish_reason == "stop"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "svc-chat"
    assert reply.fingerprint
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0
    extra = usage.model_dump()
    assert extra["prompt_cache_hit_tokens"] == usage.prompt_tokens_details.cached_tokens
    assert extra["prompt_cache_hit_tokens"] + extra["prompt_cache_miss_tokens"] == usage.prompt_tokens


@pytest.mark.parametrize("way", OTHER_WAYS)
async def test_sync_streams_and_async_whole_replies_read_the_same(
    way: str, ask: Ask, client: OpenAI, async_client: AsyncOpenAI
) -> None:
    expected = await ask(temperature=0)
    reply = await asking(way, client, async_client)(temperature=0)
    assert (reply.content, reply.finish_reason) == (expected.content, expected.finish_reason)
    assert reply.usage.completion_tokens == expected.usage.completion_tokens


async def test_fields_of_other_services_are_ignored(ask: Ask) -> None:
    plain = await ask(temperature=0, max_tokens=6)
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "made_up": [1, {"a": None}]}
    reply = await ask(temperature=0, max_tokens=6, **IGNORED, extra_body=extra)
    assert reply.content == plain.content


async def test_null_is_the_same_as_absent(ask: Ask) -> None:
    plain = await ask(seed=5, max_tokens=6)
    nothing = dict.fromkeys(OPTIONAL)
    reply = await ask(seed=5, max_tokens=6, **nothing, extra_body=dict.fromkeys(EXTENSIONS))
    assert reply.content == plain.content


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_reply_that_is_cut_by_its_limit_says_length(ask: Ask, field: str) -> None:
    reply = await ask(temperature=0, **{field: 3})
    assert reply.finish_reason == "length"
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize("fields", [{"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}, {"top_p": 1e-9}])
async def test_only_the_most_likely_token_remains_with(ask: Ask, fields: dict[str, Any]) -> None:
    greedy = await ask(temperature=0, max_tokens=6)
    assert (await ask(temperature=2, seed=1, max_tokens=6, **fields)).content == greedy.content


async def test_a_seed_gives_the_same_reply_again_and_another_one_another(ask: Ask) -> None:
    first, again, other = [await ask(seed=seed, temperature=1.3, max_tokens=12, messages=SEA) for seed in (1, 1, 2)]
    assert first.content == again.content != other.content


async def test_n_choices_differ_and_the_prompt_is_counted_once(ask: Ask) -> None:
    alone = await ask(seed=3, max_tokens=8, messages=SEA)
    reply = await ask(seed=3, max_tokens=8, n=3, messages=SEA)
    assert len({choice.content for choice in reply.choices}) == 3
    assert reply.choices[0].content == alone.content
    assert reply.usage.prompt_tokens == alone.usage.prompt_tokens
    assert alone.usage.completion_tokens == 8
    assert 8 < reply.usage.completion_tokens <= 24


async def test_choices_have_their_own_ends_and_probabilities(ask: Ask) -> None:
    reply = await ask(seed=3, max_tokens=4, n=2, logprobs=True)
    for choice in reply.choices:
        assert choice.finish_reason in ("stop", "length")
        assert spelled(choice) == choice.content


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"extra_body": {"repetition_penalty": 10}}],
    ids=["frequency", "presence", "repetition"],
)
async def test_a_penalty_takes_from_a_token_that_was_there(
    ask: Ask, id_of: Callable[[list[int] | None], str], penalty: dict[str, Any]
) -> None:
    one: dict[str, Any] = {"temperature": 0, "logprobs": True, "top_logprobs": 1}
    [choice] = (await ask(**one, max_tokens=1)).choices
    [first] = choice.tokens
    number = id_of(first.bytes)
    [choice] = (await ask(**one, max_tokens=2, logit_bias={number: 100})).choices
    assert [token.bytes for token in choice.tokens] == [first.bytes] * 2
    behind = choice.tokens[1].top_logprobs[0].logprob - choice.tokens[1].logprob
    bias = {number: behind + 1}  # now it wins by 1
    for more, repeats in (({}, True), (penalty, False)):
        [choice] = (await ask(**one, max_tokens=2, logit_bias=bias, **more)).choices
        assert choice.tokens[0].bytes == first.bytes
        assert (choice.tokens[1].bytes == first.bytes) is repeats


async def test_a_bias_of_100_makes_a_token_certain_and_one_of_minus_100_bans_it(
    ask: Ask, id_of: Callable[[list[int] | None], str]
) -> None:
    sea = id_of(list(b" sea"))
    assert (await ask(seed=1, max_tokens=4, logit_bias={sea: 100})).content == " sea" * 4
    one: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": True}
    [first] = (await ask(**one)).choices[0].tokens
    [other] = (await ask(**one, logit_bias={id_of(first.bytes): -100})).choices[0].tokens
    assert other.bytes != first.bytes


async def test_log_probabilities_come_with_bytes_and_as_many_others_as_asked(ask: Ask) -> None:
    reply = await ask(temperature=0, logprobs=True, top_logprobs=3)
    [choice] = reply.choices
    assert len(choice.tokens) == reply.usage.completion_tokens
    assert spelled(choice) == choice.content
    for token in choice.tokens:
        assert token.logprob <= 0
        assert [other.logprob for other in token.top_logprobs] == sorted(
            (other.logprob for other in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # at temperature 0
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.0001


async def test_log_probabilities_without_others_have_the_token_alone(ask: Ask) -> None:
    [choice] = (await ask(temperature=0, logprobs=True, max_tokens=2)).choices
    assert [token.top_logprobs for token in choice.tokens] == [[], []]


async def test_a_reply_ends_before_a_stop_string(ask: Ask) -> None:
    whole = (await ask(temperature=0, max_tokens=12)).content
    pieces = [whole[at : at + 3] for at in range(4, len(whole) - 3)]
    stop = next(piece for piece in pieces if "\ufffd" not in piece)
    for stops in (stop, ["nothing like it", stop]):
        reply = await ask(temperature=0, max_tokens=12, stop=stops)
        assert reply.finish_reason == "stop"
        assert reply.content == whole[: whole.index(stop)]


async def test_a_reply_has_at_least_min_tokens(ask: Ask) -> None:
    least = TOKENS + 10
    assert (await ask(temperature=0)).usage.completion_tokens < least
    reply = await ask(temperature=0, max_tokens=least + 10, extra_body={"min_tokens": least})
    assert reply.usage.completion_tokens >= least


async def test_ignore_eos_goes_on_to_the_limit(ask: Ask) -> None:
    reply = await ask(temperature=0, max_tokens=TOKENS + 10, extra_body={"ignore_eos": True})
    assert (reply.usage.completion_tokens, reply.finish_reason) == (TOKENS + 10, "length")


async def test_a_prefix_is_continued(ask: Ask, tokenizer: Any) -> None:
    text = "The capital of France is"
    begun = {"role": "assistant", "content": text, "prefix": True}
    plain = await ask(temperature=0, max_tokens=3)
    reply = await ask(temperature=0, max_tokens=3, messages=[*QUESTION, begun])
    assert not reply.content.startswith(text)
    tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert reply.usage.prompt_tokens == plain.usage.prompt_tokens + tokens  # the template adds nothing


async def test_text_parts_count_as_their_lines(ask: Ask) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    by_parts = await ask(temperature=0, max_tokens=6, messages=[{"role": "user", "content": parts}])
    text = "What is the capital\nof France?"
    as_text = await ask(temperature=0, max_tokens=6, messages=[{"role": "user", "content": text}])
    assert by_parts.content == as_text.content
    assert by_parts.usage.prompt_tokens == as_text.usage.prompt_tokens


async def test_a_developer_speaks_as_the_system(ask: Ask) -> None:
    told = [
        await ask(temperature=0, max_tokens=8, messages=[{"role": role, "content": "Talk like a pirate."}, *QUESTION])
        for role in ("developer", "system")
    ]
    assert told[0].content == told[1].content
    assert told[0].usage.prompt_tokens == told[1].usage.prompt_tokens


async def test_messages_may_have_names(ask: Ask) -> None:
    messages = [
        {"role": "system", "content": "Be short.", "name": "rules"},
        {"role": "user", "content": "I am Ada.", "name": "ada"},
        {"role": "assistant", "content": "Hello Ada.", "name": "bot"},
        {**QUESTION[0], "name": "ada"},
    ]
    assert (await ask(temperature=0, max_tokens=4, messages=messages)).content


async def test_json_mode_returns_a_json_object_at_any_temperature(ask: Ask) -> None:
    reply = await ask(
        temperature=1.5, seed=2, max_tokens=60, response_format={"type": "json_object"}, stop=None, messages=SEA
    )
    if reply.finish_reason == "length":
        assert reply.content.startswith("{")
    else:
        assert isinstance(json.loads(reply.content), dict)


async def test_a_reply_fits_a_strict_schema_at_any_temperature(ask: Ask) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Paris", "Rome"]}, "sure": {"type": "boolean"}},
        "required": ["capital", "sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    reply = await ask(temperature=1.5, seed=2, response_format=form)
    assert reply.finish_reason == "stop"
    answer = json.loads(reply.content)
    assert answer["capital"] in ("Paris", "Rome")
    assert type(answer["sure"]) is bool


async def test_tools_that_may_not_be_called_leave_a_plain_reply(ask: Ask) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    reply = await ask(temperature=0, max_tokens=6, tools=[tool], tool_choice="none")
    assert reply.content == (await ask(temperature=0, max_tokens=6)).content


def test_both_models_answer_under_both_addresses(client: OpenAI, service: Served) -> None:
    for base, model in (("", "svc-chat"), ("/v1", "svc-coder")):
        reply = client.with_options(base_url=service.url + base).chat.completions.create(
            model=model, messages=QUESTION, max_tokens=1
        )
        assert reply.model == model


def test_without_include_usage_the_chunk_with_the_finish_reason_has_the_usage(client: OpenAI) -> None:
    *chunks, last = list(
        client.chat.completions.create(model="svc-chat", messages=QUESTION, max_tokens=2, temperature=0, stream=True)
    )
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert last.choices[0].finish_reason == "length"
    assert last.usage is not None
    assert last.usage.completion_tokens == 2


def test_the_first_and_the_last_chunk_have_no_text(client: OpenAI) -> None:
    first, *_, last = client.chat.completions.create(
        model="svc-chat", messages=QUESTION, max_tokens=2, temperature=0, stream=True
    )
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert last.choices[0].delta.model_dump(exclude_none=True) == {}
    assert last.choices[0].finish_reason == "length"


def test_the_same_prompt_is_cheaper_the_second_time(client: OpenAI) -> None:
    long = [{"role": "user", "content": "The harbour was quiet. " * 20 + "Say hello."}]
    cached = []
    for _ in range(2):
        reply = client.chat.completions.create(model="svc-chat", messages=long, max_tokens=1)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] is not None
    assert cached[1] is not None
    assert cached[1] > cached[0] + 50
