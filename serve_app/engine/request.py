"""What goes into the engine and what comes out of it: the request, its sampling parameters and its events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MAX_TOP_LOGPROBS = 20


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the caller gave up
    DEADLINE = "deadline"  # its deadline passed, or that of its first token while it had none
    ERROR = "error"  # the engine failed; nothing is billed


class GrammarKind(StrEnum):
    """What the text of a `Grammar` is."""

    JSON_OBJECT = "json_object"  # no text: any one JSON object
    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON
    LARK = "lark"  # llguidance's dialect of Lark
    REGEX = "regex"  # Rust's syntax; the whole reply matches
    CHOICE = "choice"  # a JSON array of strings, of which the reply is one
    TOOL_CALLS = "tool_calls"  # made by `Grammar.tool_calls`


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply has to look like. `grammar.GrammarCompiler` says whether it can be held to.

    `strict` refuses JSON schemas with keywords that can't be enforced; else those are ignored.

    With a `lead`, plain text or a special token's name, the grammar begins after its first occurrence and, at most,
    two line feeds: before that the reply may say anything but end.
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
        lead: str = "",
    ) -> Grammar:
        """A reply that is one of `alternatives`, (text before, JSON Schema of the arguments, text after).

        With a `separator` one or more of them, with it in between; `opening` and `closing` stand around all. Names of
        special tokens in the texts stand for those tokens.

        With `optional`, the text or special token that calls begin with, the reply may also be text without it, or
        such text and then calls. Where they begin with nothing of their own, that is "", it is calls, or text that
        does not begin like JSON: after white space, no brace, bracket or backquote. The text has none of `never` in
        it, and does not begin with a character of `not_first`, neither at the reply's beginning nor after one of
        `shown`: markers that readers of the text know, as those of reasoning. Of special tokens it has only these.

        With `otherwise`, a JSON object or schema, the reply that is no call is not any text but that.
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
            }
        )
        return cls(GrammarKind.TOOL_CALLS, text, strict, lead)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Ranges are checked by the caller (see docs/api.md)."""

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
    mark: str = ""  # text of which `Finished.marked_tokens` says where it first was
    seed: int | None = None
    min_tokens: int = 0  # no end-of-sequence or stop string before so many tokens
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, -100..100), added to its logit; -100 bans the token
    logprobs: int | None = None  # None is off, 0 the chosen token's alone, up to 20 of the likeliest beside it
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `request_id` is unique among the engine's live requests."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""  # whose fair share the request counts against, and whose cached prefixes it may use
    weight: float = 1.0  # > 0, of the tenant: what it is served counts this many times less
    deadline: float | None = None  # the engine clock's seconds, past which it ends within one step
    first_token_by: float | None = None  # the same, but a request that has produced a token runs on


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has left the queue: its first prefill chunk runs."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed anew
    fingerprint: str = ""  # of the weights and all else that decides about replies; empty where it is not told


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability by the model's raw logits, before any sampling parameter.

    `text` has U+FFFD for parts of characters, of which `raw` has the exact bytes; a special token has its name.
    """

    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the likeliest tokens at its place, likeliest first


@dataclass(frozen=True, slots=True)
class Delta:
    """New text. `completion_tokens` counts all tokens of output so far, those of this delta included.

    `tokens` are those of this delta, only where `SamplingParams.logprobs` asks for them; held-back text may follow
    in a later delta.
    """

    text: str
    completion_tokens: int
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event of a request, with exact counts."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    marked_tokens: int | None = None  # of them, up to the one that completed `SamplingParams.mark`; None: it never came


Event = Started | Delta | Finished
