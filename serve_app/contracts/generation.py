"""A call to a model and the events of its reply, from the gateway through the replica to the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from serve_app.contracts.messages import Message, set_state
from serve_app.contracts.money import Price
from serve_app.contracts.trace_context import TraceCall

_BEGINNING: Final = 256  # characters or tokens of a raw prompt that identify its conversation


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # the caller cancelled, or the engine stopped
    DEADLINE = "deadline"  # the request waited in the queue for too long
    ERROR = "error"  # the engine failed on this request


class GrammarKind(StrEnum):
    JSON_OBJECT = "json_object"  # any JSON object; `text` is empty
    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON
    REGEX = "regex"  # a regular expression for the whole reply
    TOOL_CALLS = "tool_calls"  # made by `Grammar.tool_calls`


@dataclass(frozen=True, slots=True)
class Grammar:
    """The required form of a reply. The engine's GrammarCompiler checks whether it can be enforced.

    `strict` rejects JSON schemas with keywords that cannot be enforced; otherwise such keywords are ignored.

    `lead` is plain text or the name of a special token. The grammar begins after its first occurrence and up to two
    line feeds that follow it. Until then, the reply may be any text, but it may not end.
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
        """Builds a grammar for a reply that is one of `alternatives`.

        Each alternative is (text before, JSON Schema of the arguments, text after). With a `separator`, the reply is
        one or more alternatives, separated by it. `opening` and `closing` enclose all of them. Names of special tokens
        in these texts stand for those tokens.

        `optional` is the text or special token with which calls begin. With it, the reply may also be text that does
        not contain it, or such text followed by calls. If calls have no such beginning, `optional` is "". The reply is
        then either calls or text that does not begin like JSON: its first character after white space is not a brace,
        bracket or backquote. The text contains none of `never`, and no special tokens except `shown`, which are markers
        such as those of reasoning. No character of `not_first` may begin the reply or follow one of `shown`.

        `otherwise` is a grammar for a JSON object or JSON schema. If it is given, a reply without calls must match it.

        `lenient` lists the indices of alternatives whose schemas are not strict, whatever `strict` says.
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
    """Parameters that control how tokens are chosen. The caller checks the ranges (docs/api.md)."""

    max_tokens: int  # maximum output, without the end-of-sequence token; 0: compute only the prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    repetition_penalty: float = 1.0  # 0.01..10, over prompt and output
    frequency_penalty: float = 0.0  # -2..2, over output
    presence_penalty: float = 0.0  # -2..2, over output
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the reply, besides the model's end-of-sequence tokens
    include_stop_str_in_output: bool = False  # the stop string or token is part of the reply
    shown: tuple[str, ...] = ()  # special tokens whose names appear in the text; other special tokens produce no text
    mark: str = ""  # `Finished.marked_tokens` counts the tokens up to the first occurrence of this text
    seed: int | None = None
    min_tokens: int = 0  # minimum number of tokens before an end-of-sequence token or stop string
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, -100..100), added to its logit; -100 bans the token
    logprobs: int | None = None  # None: off; 0: only the chosen token; up to 20: also this number of most likely tokens
    grammar: Grammar | None = None
    token_ids: bool = False  # deltas include token ids, so another replica can continue the reply
    prompt_logprobs: int | None = None  # as `logprobs`, for the tokens of the prompt
    end_logprob: bool = False  # `logprobs` also returns the end-of-sequence token that ends the reply, with `raw` empty

    __setstate__ = set_state


class Started(Message, frozen=True):
    """The sequence has left the queue and its first prefill chunk runs.

    An engine may not know `cached_tokens` before the first token. It then sends a second Started, without `said_text`.
    """

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were not computed again
    fingerprint: str = ""  # identifies the weights and everything else that determines replies; set by the replica
    replica: str = ""  # name of the replica; set by the replica
    said: int = 0  # number of tokens in `GenerateCall.said`
    said_text: str = ""  # text of these tokens that later tokens cannot change; only the replica uses it


class TokenLogprob(Message, frozen=True):
    """A token and its natural log-probability by the model's raw logits, before any sampling parameter.

    In `text`, an incomplete character is U+FFFD, and a special token is written as its name. `raw` has the exact bytes.
    """

    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # most likely tokens at this position, most likely first


class Delta(Message, frozen=True):
    """New text. `completion_tokens` counts all output tokens so far, including this delta's.

    `tokens` has this delta's tokens, only if `SamplingParams.logprobs` requests them. The last part of their text may
    follow in a later delta. `token_ids` has this delta's token ids, only if `SamplingParams.token_ids` requests them.
    In that case, `is_last` marks the last delta of the reply, and every other delta has all text that later tokens
    cannot change. Another engine can therefore continue the reply if it gets the tokens so far as `said`.
    """

    text: str
    completion_tokens: int
    tokens: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    is_last: bool = False


class Finished(Message, frozen=True):
    """The last event of every request, with exact counts."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    marked_tokens: int | None = None  # tokens until `SamplingParams.mark` was complete; None: it did not occur
    stop: str | None = None  # the stop string that ended the reply; None also with several choices


class PromptScored(Message, frozen=True):
    """The next tokens of the prompt, if `SamplingParams.prompt_logprobs` requests them.

    All of them come after `Started` and before the first Delta. The `logprob` of the first token is 0 and has no
    meaning, because no token precedes it.
    """

    tokens: tuple[TokenLogprob, ...]


Event = Started | PromptScored | Delta | Finished


class Ending(StrEnum):
    COMPLETE = "complete"  # the arguments are one complete JSON object
    CUT = "cut"  # the reply ended within the call
    MALFORMED = "malformed"  # not JSON, but some arguments were sent before this was known; the rest is sent as text


class Reasoning(Message, frozen=True):
    text: str


class Text(Message, frozen=True):
    """Text that is neither reasoning nor part of a call."""

    text: str


class CallStarted(Message, frozen=True):
    """The start of a tool call. `index` counts the calls of a reply from 0."""

    index: int
    id: str
    name: str


class CallArguments(Message, frozen=True):
    """A piece of the call's arguments. All pieces together are JSON text."""

    index: int
    text: str


class CallEnded(Message, frozen=True):
    """The end of a call. Calls do not overlap."""

    index: int
    ending: Ending = Ending.COMPLETE


class PromptEcho(Message, frozen=True):
    """A raw prompt, or a piece of it, sent back before the first output of its choices.

    It is sent in a ReplyParts whose `choice` is the prompt's first choice. If log-probabilities of the prompt were
    requested, the `tokens` of this ReplyParts are tokens of the prompt; the first `logprob` has no meaning, as in
    PromptScored. The first piece has all token ids of the prompt in `ids`.
    """

    prompt: str
    ids: tuple[int, ...] = ()


Part = Reasoning | Text | CallStarted | CallArguments | CallEnded | PromptEcho

ToolChoice = Literal["none", "auto", "required"]

REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class Bill:
    """Data with which a replica settles a request whose gateway has died: the payer and the price."""

    account_id: str
    key_id: str
    model: str
    backend: str
    price: Price
    epoch: int = 0  # as in Settlement


@dataclass(frozen=True, slots=True)
class RawPrompts:
    """Prompts to which no chat template applies. Each gets the same number of choices.

    The name of a special token in a text is encoded as that token, unless there is a `suffix`.
    """

    prompts: tuple[str | tuple[int, ...], ...]  # texts or token ids
    suffix: str | None = None  # text after the reply; the model must have tokens for filling in the middle
    special_tokens: bool = True  # the tokenizer adds its special tokens to a text, such as a beginning-of-text token
    echo: bool = False  # the reply begins with PromptEcho
    scored: bool = False  # with `echo`: PromptEcho has the log-probabilities of the prompt's tokens

    __setstate__ = set_state

    @property
    def beginning(self) -> tuple[dict[str, Any], ...]:
        """The beginning of the first prompt, as a message. Requests with equal beginnings can share a cached prompt."""
        return ({"role": "user", "content": self.prompts[0][:_BEGINNING]},)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Asks a replica for a reply with `n` choices.

    `credit` is the hold in nano-units. It must pay for every prompt once and for the output budget of every choice.
    `tools` are the request's tools, as the API defines them. If `function` is given, the model may call only that tool.
    If `functions` are given, it may call only those. Otherwise, it may call all of `tools`.
    """

    request_id: str
    messages: tuple[dict[str, Any], ...]
    sampling: SamplingParams
    credit: int
    bill: Bill
    continue_final: bool = False
    settle_after_s: float = 2.0  # seconds that a replica waits after a disconnect before it settles for a dead gateway
    weight: float = 1.0  # the account's weight in the engine's fair queue
    # Seconds from the call, because machines' clocks differ. A request that waits longer than this ends with DEADLINE.
    first_token_within_s: float | None = None
    n: int = 1
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "none"
    function: str | None = None
    functions: tuple[str, ...] = ()
    parallel_calls: bool = True  # whether the reply may have several calls
    trace: TraceCall | None = None
    said: tuple[int, ...] = ()  # tokens of a reply that another replica began; only the rest is sent
    reply_id: str = ""  # with `said`: the id under which the reply began
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the model's chat template
    reasoning_effort: str | None = None  # one of REASONING_EFFORTS
    raw: RawPrompts | None = None  # replaces `messages`; `n` is then the number of choices of all prompts together

    __setstate__ = set_state

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the reply may call."""
        return _callable(self)

    @property
    def beginning(self) -> tuple[dict[str, Any], ...]:
        """The messages that identify the conversation."""
        return self.messages if self.raw is None else self.raw.beginning

    @property
    def num_prompts(self) -> int:
        return 1 if self.raw is None else len(self.raw.prompts)


class Rejection(StrEnum):
    CREDIT = "credit"  # the counted prompt costs more than the hold: adjust the hold, and repeat the call
    CONTEXT = "context"
    QUEUE_FULL = "queue_full"
    INVALID = "invalid"  # the model's template rejects the messages, or a field is not valid for the model
    CLOSED = "closed"  # the engine has stopped; Serve replaces the replica
    ADAPTER = "adapter"  # the backend is an adapter that its replicas do not have or could not load


#: Rejections that are the backend's fault: another backend may take the request.
OF_THE_BACKEND: Final = (Rejection.QUEUE_FULL, Rejection.CLOSED, Rejection.ADAPTER)


class Rejected(Message, frozen=True):
    """The last event of a request for which nothing was generated. Nothing is billed.

    It is the only event, unless the engine rejects the request after `Started`.
    """

    reason: Rejection
    prompt_tokens: int = 0  # exact; with CONTEXT, 0 if the prompt is too long to be counted
    limit: int = 0  # with CONTEXT: the maximum number of tokens
    message: str = ""  # with INVALID
    param: str = "messages"  # with INVALID, the invalid field; empty if it is unknown


class ReplyParts(Message, frozen=True):
    """More output of a choice, in parts. Plain text of a single choice is sent as the engine's Delta instead.

    `completion_tokens` counts the output of all choices so far. `tokens` are the tokens whose log-probabilities are
    sent. `token_ids` and `is_last` are as in Delta.
    """

    parts: tuple[Part, ...]
    completion_tokens: int
    tokens: tuple[TokenLogprob, ...] = ()
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    is_last: bool = False


class ChoiceEnded(Message, frozen=True):
    """The end of one of several choices. Finished, which counts all choices, follows the last one."""

    choice: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """Asks a replica for the tokens of a conversation or of a text, or for the text of tokens. Nothing is generated.

    Exactly one of `messages`, `text` and `token_ids` is given. The tokens of a conversation are those that a
    GenerateCall with the same fields would be billed for.
    """

    account_id: str
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "none"
    function: str | None = None
    functions: tuple[str, ...] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    continue_final: bool = False
    add_generation_prompt: bool = True  # False: leaves out the beginning of the assistant's message
    text: str | None = None  # a special token's name in this text is encoded as that token
    add_special_tokens: bool = True  # with `text`: also the special tokens that the tokenizer puts around a text
    token_ids: tuple[int, ...] | None = None
    only_count: bool = False  # leaves out the ids
    with_names: bool = False  # includes the names of the tokens

    __setstate__ = set_state

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the reply may call."""
        return _callable(self)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The answer to a TokenizeCall. `names` are the tokens' names in the vocabulary, such as `Ġworld`."""

    count: int
    token_ids: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    text: str = ""  # decoded from the given token ids

    __setstate__ = set_state


BackendEvent = Event | Rejected | ReplyParts | ChoiceEnded
"""With several choices, Finished counts the tokens of all of them. Its `marked_tokens` are the reasoning tokens."""


def _callable(call: GenerateCall | TokenizeCall) -> tuple[dict[str, Any], ...]:
    if call.tool_choice == "none":
        return ()
    names = call.functions if call.function is None else (call.function,)
    return tuple(tool for tool in call.tools if tool["function"]["name"] in names) if names else call.tools
