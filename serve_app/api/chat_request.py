"""Declares each field of a chat request once, and checks a body against the declarations.

`ChatRequest` has the JSON type, range, default and description of each field. The checks of a body (400, then 422), the
values that the gateway reads and the OpenAPI schema (`chat_openapi`) come from these declarations. Messages are in
`chat_messages`, functions and reply formats in `tools_and_formats`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from math import inf
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from serve_app.api import errors
from serve_app.api.chat_messages import Message, check_messages
from serve_app.api.codec import (
    MAX_ITEMS,
    FirstFault,
    Shape,
    either,
    keywords,
    parse_object,
    quote,
    typed,
    wrong_type,
)
from serve_app.api.field_checks import Check, OnlyWith, Range
from serve_app.api.prompt_estimate import estimate_prompt_tokens
from serve_app.api.structured_outputs import OTHER_FORMS, REFUSED, form_of, refuse_other_forms
from serve_app.api.tools_and_formats import (
    MAX_TOOLS,
    TOOL_CHOICES,
    NamedTool,
    ResponseFormat,
    Tool,
    check_response_format,
    check_tool_choice,
    check_tools,
    invalid,
)
from serve_app.contracts.generation import ToolChoice

ServedModels = Mapping[str, tuple[int, int]]
"""Identifier to (context length, most output), both in tokens."""

# 32768 tokens of human-written text are under 200 KB. Long runs of escaped spaces are under 4 MiB.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024

_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_STOPS: Final = 16
_MAX_BIASES: Final = 1024
_CROWDS: Final = ("content", "tool_calls")  # lists of a message whose items are at least one token each
_TOKENS_OF_A_MESSAGE: Final = 3  # minimum in every chat template: its role, its end marker and one token
_GREATEST: Final = 10**300


def _without_overflow(value: Any) -> Any:
    """Replaces an integer that no float can hold by infinity: its value is at fault, not its type."""
    if isinstance(value, int) and abs(value) > _GREATEST:
        return inf if value > 0 else -inf
    return value


def _as_strings(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    raise PydanticCustomError("string_or_array", "type")


def _check_numbers(bias: dict[str, Any]) -> dict[str, Any]:
    # A loop, to stop at the first fault as lists do.
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            wrong_type("float_type", token, value)
    return bias


def _check_max_tokens_equal(newer: int, request: ChatRequest) -> None:
    older = request.sent_max_tokens
    if older not in (None, newer):
        values = f"but they are {older} and {newer}"
        raise invalid("max_completion_tokens", f"and max_tokens must be equal when both are given, {values}")


def _check_min_tokens(least: int, request: ChatRequest) -> None:
    if request.max_tokens is not None and least > request.max_tokens:
        raise invalid("min_tokens", f"must not be above max_tokens, but {least} is above {request.max_tokens}")


def _check_stop(stops: tuple[str, ...], _: ChatRequest) -> None:
    if len(stops) > _MAX_STOPS:
        raise invalid("stop", f"must have at most {_MAX_STOPS} strings, but it has {len(stops)}")
    if "" in stops:
        raise invalid("stop", "must not have an empty string")


def _check_logit_bias(bias: dict[str, Any], _: ChatRequest) -> None:
    for token, value in bias.items():
        if not _TOKEN_ID.fullmatch(token):
            raise invalid("logit_bias", f"must have token ids as names, but one is {quote(token)}")
        _BIAS.check_value(f"logit_bias.{token}", value)


def _check_resume(options: StreamOptions, request: ChatRequest) -> None:
    if options.resume and request.n > 1:
        raise invalid("stream_options.resume", "is only possible with n: 1")
    if options.resume and request.logprobs:
        raise invalid("stream_options.resume", "is not possible with logprobs: leave one of the two out")


def _check_form(_: Any, request: ChatRequest) -> None:
    form_of(request)


Number = Annotated[float, BeforeValidator(_without_overflow)]
_Text = Annotated[str, Tag("<string>")]
_Stop = Annotated[str, Field(min_length=1)]
_Stops = Annotated[list[_Stop], Field(max_length=_MAX_STOPS)]
_ToolChoice = Annotated[_Text, keywords(enum=list(TOOL_CHOICES))] | Annotated[NamedTool, Tag("<object>")]
_Schema = Annotated[_Text | Annotated[dict[str, Any], Tag("<object>")], either("string_or_object")]
_BIAS: Final = Range(-100, 100)


class StreamOptions(Shape):
    """Options of a streamed reply."""

    include_usage: Annotated[bool | None, keywords(default=False)] = None
    """Send a last chunk with the token usage."""
    resume: Annotated[bool | None, keywords(default=False)] = None
    """Extension: if a replica fails, another one continues the reply. Requires `n: 1` and no `logprobs`."""


class ChatRequest(Shape):
    """The body of POST /chat/completions.

    The string below a field is its description in the OpenAPI document. If the gateway reads a field in a form other
    than the JSON form, the field is named `sent_…` and its wire name is the alias. A property has the gateway's form.
    """

    model: str
    """A model identifier from `/models`."""
    sent_messages: Annotated[list[Message], FirstFault(), Check(check_messages), keywords(minItems=1)] = Field(
        alias="messages"
    )
    """Messages of the conversation."""
    stream: bool = False
    """Stream the reply as server-sent events."""
    stream_options: Annotated[StreamOptions | None, OnlyWith("stream"), Check(_check_resume)] = None
    """Options for streaming. Requires `stream: true`."""
    temperature: Annotated[Number, Range(0, 2)] = 1.0
    """Sampling temperature. 0 always picks the most likely token. `/models` lists recommended values."""
    top_p: Annotated[Number, Range(0, 1, above=True)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    sent_max_tokens: Annotated[int | None, Range(1, None)] = Field(None, alias="max_tokens")
    """Maximum number of tokens per choice. Default: the model's limit, or less if context or balance allow less."""
    max_completion_tokens: Annotated[int | None, Range(1, None), Check(_check_max_tokens_equal)] = None
    """Same as `max_tokens`. If both are sent, they must be equal."""
    n: Annotated[int, Range(1, 8)] = 1
    """Number of choices to generate. The prompt is billed once."""
    stop: Annotated[
        tuple[str, ...],
        FirstFault(),
        BeforeValidator(_as_strings, json_schema_input_type=_Stop | _Stops),
        Check(_check_stop),
    ] = ()
    """Strings that end the reply. The reply does not contain them."""
    seed: Annotated[int | None, Range(-(2**63), 2**63 - 1)] = None
    """Seed for sampling. The same seed and request return the same reply."""
    frequency_penalty: Annotated[Number, Range(-2, 2)] = 0.0
    """Positive values make a token less likely each time it appears in the reply."""
    presence_penalty: Annotated[Number, Range(-2, 2)] = 0.0
    """Positive values make a token less likely once it appears in the reply."""
    sent_logit_bias: Annotated[
        dict[str, Any],
        AfterValidator(_check_numbers),
        Check(_check_logit_bias),
        keywords(
            maxProperties=_MAX_BIASES,
            propertyNames={"pattern": f"^({_TOKEN_ID.pattern})$"},
            additionalProperties={"type": "number", "minimum": _BIAS.low, "maximum": _BIAS.high},
        ),
    ] = Field({}, alias="logit_bias")
    """Values added to the logits of tokens, by token id: -100 bans a token, 100 forces it."""
    logprobs: bool = False
    """Return the log probabilities of the reply's tokens."""
    top_logprobs: Annotated[int, OnlyWith("logprobs"), Range(0, 20)] = 0
    """Number of most likely tokens to return at each position. Requires `logprobs: true`."""
    sent_response_format: Annotated[ResponseFormat | None, Check(lambda value, _: check_response_format(value))] = (
        Field(None, alias="response_format")
    )
    """Format of the reply. Default: text."""
    guided_json: Annotated[_Schema | None, Check(_check_form)] = None
    """Extension: a JSON Schema for the reply, as an object or a string. Same as a strict `json_schema`."""
    guided_regex: Annotated[str | None, Check(_check_form), keywords(minLength=1)] = None
    """Extension: a regular expression that the whole reply matches. Not together with tools."""
    guided_choice: Annotated[
        list[Annotated[str, keywords(minLength=1)]] | None, FirstFault(), Check(_check_form), keywords(minItems=1)
    ] = None
    """Extension: the reply is one of these strings. Not together with tools."""
    structured_outputs: Annotated[
        dict[str, Any] | None,
        Check(_check_form),
        keywords(
            properties={
                "json": {"type": ["object", "string", "null"], "description": "Same as `guided_json`."},
                "regex": {"type": ["string", "null"], "minLength": 1, "description": "Same as `guided_regex`."},
                "choice": {
                    "type": ["array", "null"],
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "description": "Same as `guided_choice`.",
                },
                "json_object": {
                    "type": ["boolean", "null"],
                    "description": "True: same as `response_format` with `json_object`.",
                },
            },
            additionalProperties={"enum": [None, False]},
        ),
    ] = None
    """Extension: format of the reply, as one of `json`, `regex`, `choice` or `json_object`. A request may have only
    one field that sets the format."""
    sent_tools: Annotated[
        list[Tool], FirstFault(), Check(lambda value, _: check_tools(value)), keywords(maxItems=MAX_TOOLS)
    ] = Field([], alias="tools")
    """Functions that the model may call. Names are unique."""
    sent_tool_choice: Annotated[
        Annotated[_ToolChoice, either("string_or_object")] | None,
        Check(lambda value, sent: check_tool_choice(value, sent.sent_tools)),
    ] = Field(None, alias="tool_choice")
    """`none`: no call. `auto`: the model decides. `required`: at least one call. An object: a call of this function.
    Default: `auto` with tools, else `none`."""
    parallel_tool_calls: Annotated[Any, AfterValidator(lambda value: value is not False)] = True
    """Set to false to allow at most one call per reply. Other values are ignored."""
    top_k: Annotated[int, AfterValidator(lambda k: 0 if k == -1 else k), Range(-1, 1_000_000)] = 0
    """Extension: sample from this number of most likely tokens. 0 or -1: off."""
    min_p: Annotated[Number, Range(0, 1)] = 0.0
    """Extension: minimum probability of a token, relative to the most likely one."""
    repetition_penalty: Annotated[Number, Range(0.01, 10)] = 1.0
    """Extension: values above 1 make tokens of the prompt and the reply less likely."""
    min_tokens: Annotated[int, Range(0, None), Check(_check_min_tokens)] = 0
    """Extension: minimum number of tokens to generate, up to `max_tokens`."""
    ignore_eos: bool = False
    """Extension: continue until `max_tokens` after the model has ended its reply."""

    @cached_property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The messages for a chat template.

        Each has `role` (system, user, assistant or tool), `content` (a string) and, if given, `name`, `tool_calls` and
        `tool_call_id`.
        """
        return tuple(message.plain() for message in self.sent_messages)

    @property
    def continue_final(self) -> bool:
        """Whether the last message is the beginning of the reply."""
        return bool(self.sent_messages[-1].prefix)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def resume(self) -> bool:
        return bool(self.stream_options and self.stream_options.resume)

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens per choice. None: the remaining context, up to the model's maximum output."""
        return self.max_completion_tokens if self.sent_max_tokens is None else self.sent_max_tokens

    @property
    def logit_bias(self) -> dict[int, float]:
        return {int(token): float(value) for token, value in self.sent_logit_bias.items()}

    @property
    def plain_response_format(self) -> dict[str, Any] | None:
        """The field `response_format` alone. None means text."""
        return None if self.sent_response_format is None else self.sent_response_format.plain()

    @property
    def may_call(self) -> bool:
        return self.tool_choice != "none"

    @cached_property
    def response_format(self) -> dict[str, Any] | None:
        """The form of the reply from any of its fields, as `structured_outputs.Form`. None means text."""
        return self.plain_response_format if OTHER_FORMS.isdisjoint(self.model_fields_set) else form_of(self)

    @cached_property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.model_dump(exclude_none=True) for tool in self.sent_tools)

    @property
    def tool_choice(self) -> ToolChoice:
        if isinstance(self.sent_tool_choice, NamedTool):
            return "required"
        if self.sent_tool_choice is None:
            return "auto" if self.sent_tools else "none"
        return TOOL_CHOICES[self.sent_tool_choice]

    @property
    def forced_function(self) -> str | None:
        """The only function that the reply may call; `tool_choice` is then required. None if there is no such limit."""
        return self.sent_tool_choice.function.name if isinstance(self.sent_tool_choice, NamedTool) else None

    @cached_property
    def estimated_prompt_tokens(self) -> int:
        return estimate_prompt_tokens(self.messages, self.tools if self.tool_choice != "none" else ())


RequestT = TypeVar("RequestT", bound=ChatRequest)


def parse_chat_request(
    raw: bytes, served: ServedModels, max_body_bytes: int = MAX_BODY_BYTES, max_items: int = MAX_ITEMS
) -> ChatRequest:
    """Parses and checks the body of POST /chat/completions.

    A null field counts as absent and unknown fields are ignored, because common clients send both. Raises ApiError: 400
    for the first wrong type or missing field; if there is none, 422 for the first wrong value. Never raises anything
    else, for any bytes.
    """
    return check_chat_request(parse_object(raw, max_body_bytes, max_items), served)


def check_chat_request(parsed: Mapping[str, Any], served: ServedModels) -> ChatRequest:
    """Checks a request whose JSON is parsed. Doors of other formats call it with the same request in this format."""
    return check_request_of(ChatRequest, parsed, served)


def check_request_of(kind: type[RequestT], parsed: Mapping[str, Any], served: ServedModels) -> RequestT:
    """Does the same as `check_chat_request`, and returns a request of this class."""
    _refuse_crowds(parsed, served)
    request = typed(kind, {name: value for name, value in parsed.items() if value is not None})
    if request.model not in served:
        raise errors.model_not_found(request.model, served)
    if not REFUSED.keys().isdisjoint(parsed):
        refuse_other_forms(parsed)
    _, most_output = served[request.model]
    sent = request.model_fields_set
    for name, field, marker in _CHECKS:
        if name not in sent:
            continue
        if isinstance(marker, Range):
            marker.check_value(field, getattr(request, name), most_output)
        elif isinstance(marker, Check):
            marker.function(getattr(request, name), request)
        elif not getattr(request, marker.flag):
            raise invalid(field, f"is only possible with {marker.flag}: true")
    return request


def _refuse_crowds(parsed: Mapping[str, Any], served: ServedModels) -> None:
    """Rejects more messages than any context holds, and too many tools or biases, before the items are read.

    This is the only exception to the rule "types before values". Checking the types of 100,000 items would take a
    second.
    """
    messages, tools = parsed.get("messages"), parsed.get("tools")
    longest = max((context for context, _ in served.values()), default=0)
    if isinstance(messages, list):
        found = (part for message in messages if isinstance(message, dict) for part in map(message.get, _CROWDS))
        tokens = len(messages) * _TOKENS_OF_A_MESSAGE + sum(len(part) for part in found if isinstance(part, list))
        if tokens > longest:
            raise errors.context_length_exceeded(0, longest)
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"must be at most {MAX_TOOLS}, but it has {len(tools)}")
    biases = parsed.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > _MAX_BIASES:
        raise invalid("logit_bias", f"must have at most {_MAX_BIASES} token ids, but it has {len(biases)}")


# If several values are wrong, the first in this order is reported. Other fields follow in the order of declaration.
_VALUE_ORDER: Final = (
    *("messages", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "tools"),
    *("tool_choice", "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("stop", "seed", "n"),
)


def _checks() -> list[tuple[str, str, Range | OnlyWith | Check]]:
    """Returns attribute, wire name and marker, in the order in which values are checked."""
    rows = [
        (name, field.alias or name, marker)
        for name, field in ChatRequest.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, Range | OnlyWith | Check)
    ]
    order = {name: at for at, name in enumerate(_VALUE_ORDER)}
    return sorted(rows, key=lambda row: order.get(row[1], len(order)))


_CHECKS: Final = _checks()
