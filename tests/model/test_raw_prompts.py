"""Raw prompts in a replica: their tokens, filling in the middle, several prompts in one call and what is billed."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from serve_app.contracts.books import Outcome, Settled, Settlement
from serve_app.contracts.generation import (
    ChoiceEnded,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateCall,
    PromptEcho,
    PromptScored,
    RawPrompts,
    Rejected,
    Rejection,
    ReplyParts,
    Started,
    Text,
    TokenLogprob,
)
from serve_app.contracts.ports import SettleAnswer
from serve_app.engine.chat import ChatRenderer
from serve_app.engine.errors import ContextLengthExceeded, QueueFull, RequestRefused
from serve_app.engine.request import GenerationRequest
from serve_app.gateway.conversations import conversation_key
from serve_app.model.dialect import Dialect
from serve_app.model.fill_in_middle import GAP_TOKENS, GapTokens
from serve_app.model.replica import SHORT, Replica, _is_short
from tests.engine.fakes import byte_tokenizer
from tests.model.test_replica import PRICE, a_call

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 256


def raw_call(*prompts: str | tuple[int, ...], n: int = 0, sampling: dict[str, Any] | None = None, **raw: Any) -> Any:
    call = replace(a_call(), messages=(), raw=RawPrompts(prompts, **raw), n=n or len(prompts))
    return replace(call, sampling=replace(call.sampling, **(sampling or {})))


def tokenizer_with(*names: str, begins: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, and these special tokens from id 257 on. `begins` is added to a text."""
    core = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer).backend_tokenizer
    core = type(core).from_str(core.to_str())
    core.add_special_tokens([AddedToken(name, special=True) for name in names])
    if begins is not None:
        token = core.token_to_id(begins)
        core.post_processor = processors.TemplateProcessing(
            single=f"{begins} $A", special_tokens=[(begins, token)], pair=None
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


@cache
def renderer(*names: str, begins: str | None = None) -> ChatRenderer:
    return ChatRenderer(tokenizer_with(*names, begins=begins), 1000)


def ids(chat: ChatRenderer, *prompts: str | tuple[int, ...], **raw: Any) -> list[list[int]]:
    return [prompt.token_ids for prompt in Dialect(chat).prompts(raw_call(*prompts, **raw))]


def test_names_of_special_tokens_in_a_raw_text_become_these_tokens() -> None:
    assert ids(renderer(), "a<eos>b", "é") == [[97, EOS, 98], [0xC3, 0xA9]]


def test_a_text_gets_what_the_tokenizer_adds_unless_the_call_leaves_it_out() -> None:
    chat = renderer("<s>", begins="<s>")
    assert ids(chat, "a", "") == [[257, 97], [257]]
    assert ids(chat, "a", special_tokens=False) == [[97]]
    assert ids(chat, (97, 98)) == [[97, 98]]


def test_half_of_a_surrogate_pair_becomes_a_question_mark() -> None:
    assert ids(renderer(), "a\ud800b") == [[97, 63, 98]]


def test_an_echo_has_the_text_as_it_was_sent_and_that_of_token_ids() -> None:
    first, second = Dialect(renderer()).prompts(raw_call("a<eos>", (98, EOS), echo=True))
    assert first.echo == PromptEcho("a<eos>", (97, EOS))
    assert second.echo == PromptEcho("b<eos>", (98, EOS))


@pytest.mark.parametrize(
    ("prompts", "raw", "param", "words"),
    [
        (("",), {}, "prompt", "prompt is empty, and this model has no token for the beginning"),
        (("a", (1, 257)), {}, "prompt", r"prompt\[1\] has the token id 257, .* ids are from 0 to 256"),
        (("a",), {"suffix": "b"}, "suffix", "has no tokens for filling in the middle"),
    ],
)
def test_a_prompt_that_cannot_be_encoded_is_refused_by_name(
    prompts: Any, raw: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestRefused, match=words) as refused:
        ids(renderer(), *prompts, **raw)
    assert refused.value.param == param


@pytest.mark.parametrize("names", GAP_TOKENS)
def test_a_gap_is_marked_by_the_models_own_tokens(names: GapTokens) -> None:
    found = tuple(filter(None, (names.prefix, names.suffix, names.middle)))
    chat = renderer("<s>", *found, begins="<s>")
    prefix, suffix, *middle = range(258, 258 + len(found))
    parts = [[prefix, 97], [suffix, 98]]
    if names.suffix_first:
        parts.reverse()
    assert ids(chat, "a", suffix="b") == [[257, *parts[0], *parts[1], *middle]]


def test_a_long_text_after_a_gap_is_refused_untokenized_and_makes_each_prompt_long() -> None:
    chat = renderer("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    with pytest.raises(ContextLengthExceeded) as refused:
        ids(chat, "a", suffix="b" * 1_000_000)
    assert (refused.value.prompt_tokens, refused.value.limit) == (0, 1000)  # nothing was counted
    assert _is_short(raw_call("a", "a", suffix="b" * (SHORT // 2 - 10)))
    assert not _is_short(raw_call("a", "a", suffix="b" * (SHORT // 2)))


def test_names_of_tokens_in_the_texts_around_a_gap_stay_text() -> None:
    names = GAP_TOKENS[0]
    chat = renderer(names.prefix, names.suffix, names.middle)
    [found] = ids(chat, f"a{names.middle}", suffix=f"{names.suffix}<eos>")
    assert [token for token in found if token >= EOS] == [257, 258, 259]
    text = chat.decode(found)
    assert text == f"{names.prefix}a{names.middle}{names.suffix}{names.suffix}<eos>{names.middle}"


def test_requests_whose_prompts_begin_alike_are_of_one_conversation() -> None:
    long = "x" * 1000
    calls = [raw_call(long), raw_call(long + "y"), raw_call("y" + long), raw_call((1, 2)), a_call("x")]
    keys = [conversation_key("a", call.beginning) for call in calls]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_a_message_of_an_earlier_release_has_no_raw_prompts() -> None:
    state = a_call().__reduce_ex__(2)[2]
    fields = list(GenerateCall.__dataclass_fields__)
    earlier = object.__new__(GenerateCall)
    earlier.__setstate__(list(state)[: fields.index("raw")])  # type: ignore[attr-defined]
    assert earlier.raw is None
    assert pickle.loads(pickle.dumps(raw_call("a"))) == raw_call("a")


# Several prompts

Scripts = dict[int, list[Any]]  # what the engine says, by the number of the choice


class Engine:
    """Says a script for each choice. Renders a token a byte."""

    max_context = 100
    fingerprint = "f"

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.chat = renderer()
        self.requests: dict[int, GenerationRequest] = {}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        number = int(request.request_id.partition("#")[2] or 0)
        self.requests[number] = request
        for step in self.scripts[number]:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, list):
                if step:
                    raise step.pop()
            else:
                yield step


class Made:
    def __init__(self, scripts: Scripts) -> None:
        self.engine = Engine(scripts)
        self.settled: list[Settlement] = []
        self.replica = Replica(self.engine, self.settle)  # type: ignore[arg-type]

    async def settle(self, settlements: list[Settlement]) -> list[SettleAnswer]:
        self.settled += settlements
        return [Settled(settlement.request_id, 0, 0, 1) for settlement in settlements]

    async def all(self, call: GenerateCall) -> list[Any]:
        async with asyncio.timeout(60):
            return [event async for event in self.replica.generate(call)]

    async def cut(self, call: GenerateCall, events: int) -> Settlement | None:
        """Reads so many events, hangs up, and returns what the replica settles for a dead gateway."""
        replies = self.replica.generate(replace(call, settle_after_s=0.0))
        async with asyncio.timeout(60):
            for _ in range(events):
                await anext(replies)
            await replies.aclose()
            await self.replica.drain()
        return self.settled[0] if self.settled else None


def says(prompt: int, *pieces: str, cached: int = 0, reason: FinishReason = STOP) -> list[Any]:
    deltas = [Delta(text, number) for number, text in enumerate(pieces, start=1)]
    return [Started(prompt, cached), *deltas, Finished(reason, prompt, cached, len(pieces))]


def texts(events: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events:
        if isinstance(event, ReplyParts):
            text = "".join(part.text for part in event.parts if isinstance(part, Text))
            found[event.choice] = found.get(event.choice, "") + text
    return found


async def test_each_prompt_gets_its_choices_and_is_counted_once() -> None:
    made = Made(
        {0: says(1, "a"), 1: says(1, "b", "c", cached=1), 2: says(3, "d", cached=2), 3: says(3, "e", reason=LENGTH)}
    )
    events = await made.all(raw_call("x", "xyz", n=4, sampling={"seed": 5}))
    assert texts(events) == {0: "a", 1: "bc", 2: "d", 3: "e"}
    assert events[0] == Started(1, 0, "f")
    assert events[-1] == Finished(STOP, 4, 2, 5)
    assert {event.choice: event.reason for event in events if isinstance(event, ChoiceEnded)} == {
        **dict.fromkeys((0, 1, 2), STOP),
        3: LENGTH,
    }
    prompts = {number: request.prompt_token_ids for number, request in made.engine.requests.items()}
    assert prompts == {0: (120,), 1: (120,), 2: (120, 121, 122), 3: (120, 121, 122)}
    seeds = {number: request.sampling.seed for number, request in made.engine.requests.items()}
    assert seeds[0] == seeds[2] == 5  # a prompt gets the same reply as alone
    assert seeds[1] == seeds[3] != 5


async def test_a_full_queue_delays_the_other_prompts_and_rejects_only_the_first() -> None:
    made = Made({0: says(1, "a"), 1: [[QueueFull(1)], *says(1, "b")]})
    assert texts(await made.all(raw_call("x", "y"))) == {0: "a", 1: "b"}
    made = Made({0: [[QueueFull(1)]], 1: says(1, "b")})
    assert await made.all(raw_call("x", "y")) == [Rejected(Rejection.QUEUE_FULL)]


async def test_the_hold_must_pay_for_every_prompt_and_choice() -> None:
    call = raw_call("xx", "yyy", n=4, sampling={"max_tokens": 10})
    cost = PRICE.cost(5, 0, 40)
    assert await Made({}).all(replace(call, credit=cost - 1)) == [Rejected(Rejection.CREDIT, prompt_tokens=5)]
    made = Made(dict.fromkeys(range(4), says(1, "a")))
    assert isinstance((await made.all(replace(call, credit=cost)))[-1], Finished)


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    events = await Made({}).all(raw_call("x", "y" * 100))
    assert events == [Rejected(Rejection.CONTEXT, prompt_tokens=100, limit=100)]


async def test_a_prompt_that_cannot_be_encoded_is_rejected_by_name() -> None:
    [rejected] = await Made({}).all(raw_call("x", suffix="y"))
    assert (rejected.reason, rejected.param) == (Rejection.INVALID, "suffix")
    assert rejected.message.endswith("Leave it out.")


async def test_a_cut_call_bills_the_prompts_that_have_produced_something() -> None:
    never = asyncio.Event()
    made = Made({0: [Started(2, 1), Delta("a", 1), never], 1: [Started(5, 0), never], 2: [Started(7, 3), never]})
    settled = await made.cut(raw_call("xx", "y" * 5, "z" * 7), 2)
    assert settled is not None
    assert (settled.prompt_tokens, settled.cached_tokens, settled.completion_tokens) == (2, 1, 1)
    made = Made({0: [Started(2, 1), never], 1: [Started(5, 0), Delta("a", 1), never], 2: [Started(7, 3), never]})
    events = made.replica.generate(raw_call("xx", "y" * 5, "z" * 7))
    assert await anext(events) == Started(2, 1, "f")
    assert await anext(events) == Started(7, 1)  # the gateway counts the same
    assert isinstance(await anext(events), ReplyParts)
    await events.aclose()


SCORED = PromptScored((TokenLogprob(120, "x", b"x", 0.0), TokenLogprob(121, "y", b"y", -1.5)))


async def test_scores_are_sent_with_the_prompt_before_its_output() -> None:
    more = PromptScored((TokenLogprob(122, "z", b"z", -2.0),))
    made = Made({0: [Started(3, 0), SCORED, more, *says(3, "a")[1:]]})
    call = raw_call("xyz", echo=True, scored=True, sampling={"prompt_logprobs": 0})
    events = await made.all(call)
    assert events[1:3] == [
        ReplyParts((PromptEcho("xyz", (120, 121, 122)),), 0, SCORED.tokens),
        ReplyParts((PromptEcho(""),), 0, more.tokens),
    ]
    assert events[3:] == [Delta("a", 1), Finished(STOP, 3, 0, 1)]


async def test_only_the_first_choice_of_a_prompt_scores_it() -> None:
    made = Made({n: [Started(2, 0), *([SCORED] if n % 2 == 0 else []), *says(2, "a")[1:]] for n in range(4)})
    call = raw_call("xy", "xy", n=4, echo=True, scored=True, sampling={"prompt_logprobs": 0})
    events = await made.all(call)
    echoes = [event.choice for event in events if isinstance(event, ReplyParts) and event.tokens]
    assert sorted(echoes) == [0, 2]
    asked = {number: request.sampling.prompt_logprobs for number, request in made.engine.requests.items()}
    assert asked == {0: 0, 1: None, 2: 0, 3: None}


async def test_a_prompt_alone_is_sent_back_and_then_ends() -> None:
    made = Made({0: [Started(2, 0), Finished(LENGTH, 2, 0, 0)]})
    events = await made.all(raw_call("xy", echo=True, sampling={"max_tokens": 0}))
    assert events == [
        Started(2, 0, "f"),
        ReplyParts((PromptEcho("xy", (120, 121)),), 0),
        Finished(LENGTH, 2, 0, 0),
    ]


async def test_a_prompt_that_was_sent_back_is_billed_although_nothing_was_generated() -> None:
    never = asyncio.Event()
    made = Made({0: [Started(2, 0), SCORED, never]})
    call = raw_call("xy", echo=True, scored=True, sampling={"max_tokens": 0, "prompt_logprobs": 0})
    settled = await made.cut(call, 2)
    assert settled is not None
    assert (settled.outcome, settled.prompt_tokens, settled.completion_tokens) == (Outcome.COMPLETED, 2, 0)
    assert settled.cost == PRICE.cost(2, 0, 0)


async def test_a_prompt_that_was_not_sent_back_is_free() -> None:
    made = Made({0: [Started(2, 0), asyncio.Event()]})
    assert await made.cut(raw_call("xy", echo=True, sampling={"max_tokens": 0}), 1) is None


def test_sampling_of_a_raw_call_is_that_of_the_request() -> None:
    call = raw_call("x", sampling={"stop": ("y",)})
    [prompt] = Dialect(renderer()).prompts(call)
    assert prompt.sampling == call.sampling
