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
    encode_json,
    keywords,
    parse_object,
    quote,
    typed,
    wrong_type,
)
from serve_app.api.field_checks import Check, OnlyWith, Range
from serve_app.api.prompt_estimate import estimate_prompt_tokens, estimate_raw_tokens
from serve_app.api.refused_fields import REFUSED, refuse_fields
from serve_app.api.served_names import ServedModels as ServedModels
from serve_app.api.served_names import identifier_of
from serve_app.api.structured_outputs import OTHER_FORMS, form_of
from serve_app.api.tools_and_formats import (
    MAX_TOOLS,
    TOOL_CHOICES,
    ChosenTools,
    ResponseFormat,
    Tool,
    check_response_format,
    check_tool_choice,
    check_tools,
    invalid,
)
from serve_app.contracts.generation import REASONING_EFFORTS, RawPrompts, ToolChoice

# 32768 tokens are under 200 KB of human-written text, and under 4 MiB even as long runs of escaped spaces.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024

_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_STOPS: Final = 16
_MAX_STOP_TOKENS: Final = 64
_MAX_TOKEN_ID: Final = 2**31 - 1
_MAX_BIASES: Final = 1024
_MAX_TEMPLATE_VARIABLES: Final = 16
_MAX_TEMPLATE_BYTES: Final = 8192  # all variables together, as JSON
_LISTS_OF_A_MESSAGE: Final = ("content", "tool_calls")  # each item of these lists has at least one token
_TOKENS_OF_A_MESSAGE: Final = 3  # minimum in every chat template: its role, its end marker and one token
_GREATEST: Final = 10**300


def _without_overflow(value: Any) -> Any:
    """Replaces an integer that is too large for a float with infinity.

    The error is then about its value (422), not its type (400).
    """
    if isinstance(value, int) and abs(value) > _GREATEST:
        return inf if value > 0 else -inf
    return value


def _as_strings(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value)
    raise PydanticCustomError("string_or_array", "type")


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, list):
        return tuple(value)
    raise PydanticCustomError("list_type", "type")


def _check_numbers(bias: dict[str, Any]) -> dict[str, Any]:
    # A loop that stops at the first fault, as `FirstFault` does for lists.
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


def _check_stop_tokens(tokens: tuple[int, ...], _: ChatRequest) -> None:
    if len(tokens) > _MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"must have at most {_MAX_STOP_TOKENS} ids, but it has {len(tokens)}")
    for at, token in enumerate(tokens):
        _TOKEN.check_value(f"stop_token_ids[{at}]", token)


def _check_continued(is_continued: bool, request: ChatRequest) -> None:
    if is_continued and request.sent_messages[-1].role != "assistant":
        raise invalid("continue_final_message", "is only possible if the last message is the assistant's")


def _check_generation_prompt(is_added: bool, request: ChatRequest) -> None:
    if is_added and request.continue_final_message:
        raise invalid("add_generation_prompt", "must be false with continue_final_message: true")
    if not is_added and not request.continue_final:
        raise invalid("add_generation_prompt", "can be false only with continue_final_message: true. Leave it out")


def _check_effort(effort: str, _: ChatRequest) -> None:
    if effort not in REASONING_EFFORTS:
        rule = f"must be one of {', '.join(REASONING_EFFORTS)}, but it is {quote(effort)}"
        raise invalid("reasoning_effort", rule)


def _check_template_variables(variables: dict[str, Any], _: ChatRequest) -> None:
    if len(variables) > _MAX_TEMPLATE_VARIABLES:
        rule = f"must have at most {_MAX_TEMPLATE_VARIABLES} variables, but it has {len(variables)}"
        raise invalid("chat_template_kwargs", rule)
    if (size := len(encode_json(variables))) > _MAX_TEMPLATE_BYTES:
        raise invalid("chat_template_kwargs", f"must be at most {_MAX_TEMPLATE_BYTES} bytes as JSON, but it is {size}")


def _check_logit_bias(bias: dict[str, Any], _: ChatRequest) -> None:
    for token, value in bias.items():
        if not _TOKEN_ID.fullmatch(token):
            raise invalid("logit_bias", f"must have token ids as names, but one is {quote(token)}")
        _BIAS.check_value(f"logit_bias.{token}", value)


def _check_resume(options: StreamOptions, request: ChatRequest) -> None:
    if options.resume and request.choices > 1:
        raise invalid("stream_options.resume", "is only possible with n: 1")
    if options.resume and request.logprobs:
        raise invalid("stream_options.resume", "is not possible with logprobs: leave one of the two out")
    if options.resume and request.raw is not None and request.raw.echo:
        raise invalid("stream_options.resume", "is not possible with echo or return_token_ids: leave one of them out")


def _check_form(_: Any, request: ChatRequest) -> None:
    form_of(request)


Number = Annotated[float, BeforeValidator(_without_overflow)]
_Text = Annotated[str, Tag("<string>")]
_Stop = Annotated[str, Field(min_length=1)]
_Stops = Annotated[list[_Stop], Field(max_length=_MAX_STOPS)]
_ToolChoice = Annotated[_Text, keywords(enum=list(TOOL_CHOICES))] | Annotated[ChosenTools, Tag("<object>")]
_Schema = Annotated[_Text | Annotated[dict[str, Any], Tag("<object>")], either("string_or_object")]
_BIAS: Final = Range(-100, 100)
_TOKEN: Final = Range(0, _MAX_TOKEN_ID)
_StopTokens = Annotated[list[Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]], Field(max_length=_MAX_STOP_TOKENS)]


class StreamOptions(Shape):
    """Options of a streamed reply."""

    include_usage: Annotated[bool | None, keywords(default=False)] = None
    """Send the token usage in a last chunk without choices, instead of in the chunk with the finish reason."""
    continuous_usage_stats: Annotated[bool | None, keywords(default=False)] = None
    """Extension: every chunk has the usage so far."""
    resume: Annotated[bool | None, keywords(default=False)] = None
    """Extension: if a replica fails, another one continues the reply. Requires `n: 1` and no `logprobs`."""


class ChatRequest(Shape):
    """The body of POST /chat/completions.

    The string below a field is its description in the OpenAPI document. If the gateway uses a field in a form other
    than the JSON form, the field is named `sent_…`, with its wire name as the alias. A property returns the value in
    the gateway's form.
    """

    model: str
    """A model identifier from `/models`, or one of its aliases."""
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
    sent_max_tokens: Annotated[int | None, Range(1, inf)] = Field(None, alias="max_tokens")
    """Maximum number of tokens per choice. Values above the model's limit count as the limit. Default: the limit, or
    less if context or balance allow less."""
    max_completion_tokens: Annotated[int | None, Range(1, inf), Check(_check_max_tokens_equal)] = None
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
    stop_token_ids: Annotated[
        tuple[int, ...],
        FirstFault(),
        BeforeValidator(_as_tuple, json_schema_input_type=_StopTokens),
        Check(_check_stop_tokens),
    ] = ()
    """Extension: tokens that end the reply. They are neither sent nor billed."""
    include_stop_str_in_output: bool = False
    """Extension: the reply contains the stop string or stop token that ends it."""
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
    """Set to false to allow at most one call per reply. Other values are ignored. Enforced if `tool_choice` requires a
    call; with `auto`, only if a function has `strict` or the reply has an enforced format."""
    top_k: Annotated[int, AfterValidator(lambda k: 0 if k == -1 else k), Range(-1, 1_000_000)] = 0
    """Extension: sample from this number of most likely tokens. 0 or -1: off."""
    min_p: Annotated[Number, Range(0, 1)] = 0.0
    """Extension: minimum probability of a token, relative to the most likely one."""
    repetition_penalty: Annotated[Number, Range(0.01, 10)] = 1.0
    """Extension: values above 1 make tokens of the prompt and the reply less likely."""
    min_tokens: Annotated[int, Range(0, None), Check(_check_min_tokens)] = 0
    """Extension: minimum number of tokens to generate, up to `max_tokens`."""
    ignore_eos: bool = False
    """Extension: ignore the model's end-of-sequence token, and generate until `max_tokens`."""
    continue_final_message: Annotated[bool, Check(_check_continued)] = False
    """Extension: same as `prefix` on the last message."""
    add_generation_prompt: Annotated[bool, Check(_check_generation_prompt)] = True
    """Extension: can be false only with `continue_final_message: true`, for which other servers require false."""
    reasoning_effort: Annotated[str | None, keywords(enum=list(REASONING_EFFORTS)), Check(_check_effort)] = None
    """How much a reasoning model reasons, for models whose chat template has a variable for it; else ignored."""
    chat_template_kwargs: Annotated[
        dict[str, Any], Check(_check_template_variables), keywords(maxProperties=_MAX_TEMPLATE_VARIABLES)
    ] = Field({})
    """Extension: variables of the model's chat template, such as `enable_thinking`."""

    @cached_property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The messages for a chat template.

        Each has `role` (system, user, assistant or tool), `content` (a string) and, if given, `name`, `tool_calls` and
        `tool_call_id`.
        """
        return tuple(message.plain() for message in self.sent_messages)

    @property
    def raw(self) -> RawPrompts | None:
        """The prompts of a request without messages."""
        return None

    @property
    def choices(self) -> int:
        """Number of choices of all prompts together."""
        return self.n

    @property
    def beginning(self) -> tuple[dict[str, Any], ...]:
        """The messages that identify the conversation."""
        return self.messages

    @property
    def sends_token_ids(self) -> bool:
        """Whether the reply has the ids of its tokens."""
        return False

    @property
    def continue_final(self) -> bool:
        """Whether the last message is the beginning of the reply."""
        return self.continue_final_message or bool(self.sent_messages[-1].prefix)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_usage_in_each_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def resume(self) -> bool:
        return bool(self.stream_options and self.stream_options.resume)

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens per choice, which may be above the model's limit. None: the limit.

        0 is only possible for raw prompts: nothing is generated.
        """
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
        """The form of the reply (see `structured_outputs.Form`), from whichever field sets it. None means text."""
        return self.plain_response_format if OTHER_FORMS.isdisjoint(self.model_fields_set) else form_of(self)

    @cached_property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.model_dump(exclude_none=True) for tool in self.sent_tools)

    @property
    def tool_choice(self) -> ToolChoice:
        if isinstance(self.sent_tool_choice, ChosenTools):
            return self.sent_tool_choice.mode
        if self.sent_tool_choice is None:
            return "auto" if self.sent_tools else "none"
        return TOOL_CHOICES[self.sent_tool_choice]

    @property
    def forced_function(self) -> str | None:
        """The function that the reply must call, if `tool_choice` names one. `tool_choice` is then required."""
        chosen = self.sent_tool_choice
        return chosen.function.name if isinstance(chosen, ChosenTools) and chosen.function is not None else None

    @property
    def allowed_functions(self) -> tuple[str, ...]:
        """Names of the functions that the reply may call, if `tool_choice` lists them. Empty: all functions."""
        return self.sent_tool_choice.allowed if isinstance(self.sent_tool_choice, ChosenTools) else ()

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


class RawRequest(ChatRequest):
    """A request with raw prompts instead of messages, from the door for completions."""

    sent_messages: list[Message] = Field([], alias="messages")
    raw_prompts: RawPrompts
    generates: bool = True
    """False: only the prompts are computed."""
    is_echoed: bool = False
    """The text of the reply begins with the prompt."""
    with_ids: bool = False
    """The reply has the ids of its tokens and of the prompt's."""

    @property
    def raw(self) -> RawPrompts:
        return self.raw_prompts

    @property
    def choices(self) -> int:
        return len(self.raw_prompts.prompts) * self.n

    @property
    def beginning(self) -> tuple[dict[str, Any], ...]:
        return self.raw_prompts.beginning

    @property
    def continue_final(self) -> bool:
        return False

    @property
    def sends_token_ids(self) -> bool:
        return self.with_ids

    @property
    def max_tokens(self) -> int | None:
        return super().max_tokens if self.generates else 0

    @cached_property
    def estimated_prompt_tokens(self) -> int:
        return estimate_raw_tokens(self.raw_prompts.prompts, self.raw_prompts.suffix)


def check_chat_request(
    parsed: Mapping[str, Any],
    served: ServedModels,
    kind: type[RequestT] = ChatRequest,  # type: ignore[assignment]
) -> RequestT:
    """Checks a parsed JSON request. Doors of other formats translate their requests to this format first.

    `kind` is the class of the result. In the result, `model` is the identifier, even if the request has an alias.
    """
    _refuse_too_many(parsed, served)
    fields = {name: value for name, value in parsed.items() if value is not None}
    if isinstance(model := fields.get("model"), str):
        fields["model"] = identifier_of(model, served)
    request = typed(kind, fields)
    if request.model not in served:
        raise errors.model_not_found(request.model, served)
    if not REFUSED.keys().isdisjoint(parsed):
        refuse_fields(parsed)
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


def _refuse_too_many(parsed: Mapping[str, Any], served: ServedModels) -> None:
    """Rejects a request with too many messages for the longest context, or with too many tools or biases.

    It runs before the types of the items are checked, because checking the types of 100,000 items would take a second.
    All other checks of values run after the checks of types.
    """
    messages, tools = parsed.get("messages"), parsed.get("tools")
    longest = max((context for context, _ in served.values()), default=0)
    if isinstance(messages, list):
        dicts = (message for message in messages if isinstance(message, dict))
        found = (part for message in dicts for part in map(message.get, _LISTS_OF_A_MESSAGE))
        tokens = len(messages) * _TOKENS_OF_A_MESSAGE + sum(len(part) for part in found if isinstance(part, list))
        if tokens > longest:
            raise errors.context_length_exceeded(0, longest)
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"must have at most {MAX_TOOLS} entries, but it has {len(tools)}")
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
    """Returns each check as attribute, wire name and marker, in the order in which values are checked."""
    rows = [
        (name, field.alias or name, marker)
        for name, field in ChatRequest.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, Range | OnlyWith | Check)
    ]
    order = {name: at for at, name in enumerate(_VALUE_ORDER)}
    return sorted(rows, key=lambda row: order.get(row[1], len(order)))


_CHECKS: Final = _checks()
