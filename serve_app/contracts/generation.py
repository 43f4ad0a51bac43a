"""A call to a model and the events of its reply, from the gateway through the replica to the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from serve_app.contracts.messages import set_state
from serve_app.contracts.money import Price
from serve_app.contracts.trace_context import TraceCall


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the caller gave up
    DEADLINE = "deadline"  # the deadline of its first token passed
    ERROR = "error"  # the engine failed; nothing is billed


class GrammarKind(StrEnum):
    JSON_OBJECT = "json_object"  # no text: any one JSON object
    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON
    REGEX = "regex"  # a regular expression of the whole reply
    TOOL_CALLS = "tool_calls"  # made by `Grammar.tool_calls`


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that a reply must have. The engine's GrammarCompiler checks whether it can be enforced.

    `strict` refuses JSON schemas with keywords that can't be enforced; otherwise those are ignored.

    With a `lead`, plain text or a special token's name, the grammar begins after its first occurrence and at most two
    line feeds: before that the reply may be any text, but may not end.
    """

    kind: GrammarKind
    text: str = ""
    strict: bool = True
    lead: str = ""

    @classmethod
    def tool_calls(
        cls,
        alternatives: Iterable[tuple[str, str, str]],
        separator: str | None = None,
        strict: bool = True,
        *,
        opening: str = "",
        closing: str = "",
        optional: str | None = None,
        never: Iterable[str] = (),
        not_first: str = "",
        shown: Iterable[str] = (),
        otherwise: Grammar | None = None,
        lenient: Iterable[int] = (),
        lead: str = "",
    ) -> Grammar:
        """A reply that is one of `alternatives`: (text before, JSON Schema of the arguments, text after).

        With a `separator` one or more of them, with it in between; `opening` and `closing` stand around all. Names of
        special tokens in the texts stand for those tokens.

        With `optional`, the text or special token that calls begin with, the reply may also be text without it, or
        such text and then calls. Where calls have no such beginning (""), it is calls, or text that does not begin
        like JSON: after white space, no brace, bracket or backquote. The text contains none of `never`, and no
        special tokens but `shown`: markers such as those of reasoning. Neither at the beginning of the reply nor after
        one of `shown` does it begin with a character of `not_first`.

        With `otherwise`, a JSON object or schema, a reply without calls is not any text but that.

        `lenient` are the numbers of alternatives whose schemas are not strict, whatever `strict` says.
        """
        text = json.dumps(
            {
                "alternatives": [list(a) for a in alternatives],
                "separator": separator,
                "opening": opening,
                "closing": closing,
                "optional": optional,
                "never": list(never),
                "not_first": not_first,
                "shown": list(shown),
                "otherwise": None if otherwise is None else [otherwise.kind, otherwise.text, otherwise.strict],
                "lenient": list(lenient),
            }
        )
        return cls(GrammarKind.TOOL_CALLS, text, strict, lead)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. The caller checks the ranges (docs/api.md)."""

    max_tokens: int  # >= 1, tokens of output, the end-of-sequence token not counted
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    repetition_penalty: float = 1.0  # > 0, over prompt and output
    frequency_penalty: float = 0.0  # -2..2, over output
    presence_penalty: float = 0.0  # -2..2, over output
    stop: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()  # special tokens whose names are part of the text; all others have none
    mark: str = ""  # text whose first occurrence `Finished.marked_tokens` counts to
    seed: int | None = None
    min_tokens: int = 0  # no end-of-sequence or stop string before so many tokens
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, -100..100), added to its logit; -100 bans the token
    logprobs: int | None = None  # None is off, 0 the chosen token's alone, up to 20 of the likeliest beside it
    grammar: Grammar | None = None
    token_ids: bool = False  # deltas carry them, so that the reply can be continued elsewhere

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has left the queue: its first prefill chunk runs."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed anew
    fingerprint: str = ""  # of the weights and all else that decides about replies; the replica fills it in
    replica: str = ""  # which one; it fills that in too
    said: int = 0  # tokens of the reply that the request brought and that are continued
    said_text: str = ""  # their text, as far as it is certain; it stays in the replica

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability by the model's raw logits, before any sampling parameter.

    `text` has U+FFFD for parts of characters and the name of a special token; `raw` has the exact bytes.
    """

    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the likeliest tokens in its place, likeliest first


@dataclass(frozen=True, slots=True)
class Delta:
    """New text. `completion_tokens` counts all tokens of output so far, those of this delta included.

    `tokens` are those of this delta, only where `SamplingParams.logprobs` asks for them; held-back text may follow
    in a later delta. `token_ids` are those of this delta, only where `SamplingParams.token_ids` asks for them; then
    `is_last` says that the reply ends with it. Every other delta of such a reply has all the text that is certain with
    its tokens, so that these tokens and those before, given to another engine as `said`, continue it.
    """

    text: str
    completion_tokens: int
    tokens: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    is_last: bool = False

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event of a request, with exact counts."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    marked_tokens: int | None = None  # of them, up to the one that completed `SamplingParams.mark`; None: no mark


Event = Started | Delta | Finished


class Ending(StrEnum):
    COMPLETE = "complete"  # its arguments are one complete JSON object
    CUT = "cut"  # the reply ended within it
    MALFORMED = "malformed"  # its arguments are no JSON, which showed after some were sent; the rest is text


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is neither reasoning nor part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. `index` counts the calls of a reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the call's arguments: all pieces together are JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The last part of a call. Calls do not overlap."""

    index: int
    ending: Ending = Ending.COMPLETE


Part = Reasoning | Text | CallStarted | CallArguments | CallEnded

ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Bill:
    """What a replica needs to settle a request whose gateway has died: who pays, and the price."""

    account_id: str
    key_id: str
    model: str
    backend: str
    price: Price
    epoch: int = 0  # as in Settlement


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Asks a replica for a reply of `n` choices.

    `credit` is the hold in nano-units, which must pay for the prompt once and the whole output budget of every choice.
    `tools` are those that the model may call, as the API defines them; `function` names the only one, if any.
    """

    request_id: str
    messages: tuple[dict[str, Any], ...]
    sampling: SamplingParams
    credit: int
    bill: Bill
    continue_final: bool = False
    settle_after_s: float = 2.0  # after a cut the replica waits so long before it settles for a dead gateway
    weight: float = 1.0  # of the account, in the engine's fair queue
    # Seconds from the call on, because clocks differ between machines. A reply that has begun is not cut by it.
    first_token_within_s: float | None = None
    n: int = 1
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "none"
    function: str | None = None
    parallel_calls: bool = True  # whether the reply may be several calls
    trace: TraceCall | None = None
    said: tuple[int, ...] = ()  # tokens of a reply that another replica has begun; only the rest is sent
    reply_id: str = ""  # with `said`, the id that the reply began under

    __setstate__ = set_state


class Rejection(StrEnum):
    CREDIT = "credit"  # the exact prompt needs a larger hold: adjust it and send the call again
    CONTEXT = "context"
    QUEUE_FULL = "queue_full"
    INVALID = "invalid"  # the model's template refuses the messages, or its tokens or grammars a field
    CLOSED = "closed"  # the engine has ended; Serve replaces the replica


@dataclass(frozen=True, slots=True)
class Rejected:
    """The only event of a request that did not start. Nothing was generated and nothing is billed."""

    reason: Rejection
    prompt_tokens: int = 0
    limit: int = 0  # tokens, with CONTEXT
    message: str = ""  # with INVALID
    param: str = "messages"  # with INVALID, the field at fault


@dataclass(frozen=True, slots=True)
class ReplyParts:
    """More of a choice, in parts. Plain text of an only choice comes as the engine's Delta instead.

    `completion_tokens` counts the output of all choices so far. `tokens` are those whose log-probabilities to send.
    `token_ids` and `is_last` are as in Delta.
    """

    parts: tuple[Part, ...]
    completion_tokens: int
    tokens: tuple[TokenLogprob, ...] = ()
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    is_last: bool = False

    __setstate__ = set_state


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """One of several choices is complete. Finished, which counts all of them, comes after the last."""

    choice: int
    reason: FinishReason


BackendEvent = Event | Rejected | ReplyParts | ChoiceEnded
"""Of a reply with several choices, Finished counts them all; its `marked_tokens` are those of reasoning."""
