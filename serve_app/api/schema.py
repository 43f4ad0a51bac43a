"""A chat request from its bytes to a typed, normalised object that the rest of the service can rely on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from serve_app.api import errors, json_schemas, shapes
from serve_app.api.codec import describe, parse_object, quote
from serve_app.api.estimate import estimate_prompt_tokens

ServedModels = Mapping[str, tuple[int, int]]
"""Identifier to (context length, most output), both in tokens."""

# 32768 tokens of any text that people write are under 200 KB, and of long runs of spaces, escaped, under 4 MiB.
MAX_BODY_BYTES: Final = 4 * 1024 * 1024

ToolChoice = Literal["none", "auto", "required"]
Number = TypeVar("Number", int, float)

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TOOL_CHOICES: Final[Mapping[str, ToolChoice]] = {"none": "none", "auto": "auto", "required": "required"}
_FUNCTION_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_MOST_STOPS: Final = 16
_MOST_TOOLS: Final = 128
_CROWDS: Final = ("content", "tool_calls")  # lists of a message whose items are a token each at least
_TOKENS_OF_A_MESSAGE: Final = 3  # at least: in every chat template its role, its end and one of its own
_SEED: Final = 2**63
_MOST_TOP_K: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request. Ranges and defaults are those of the wire contract.

    `messages` are ready for a chat template: plain dicts with `role` (system, user, assistant or tool), `content` (a
    string; text parts are joined by line feeds) and, where given, `name`, `tool_calls` and `tool_call_id`.
    """

    model: str
    messages: tuple[dict[str, Any], ...]
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None  # None: as much as the context leaves, at most what the model gives
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    continue_final: bool = False  # the last message is the beginning of the reply
    n: int = 1
    logit_bias: Mapping[int, float] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: Mapping[str, Any] | None = None  # None is text
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "none"
    forced_function: str | None = None  # the only function that may be called, with `required`
    parallel_tool_calls: bool = True  # whether a reply that must call may be several calls
    estimated_prompt_tokens: int = 1


def parse_chat_request(raw: bytes, served: ServedModels, max_body_bytes: int = MAX_BODY_BYTES) -> ChatRequest:
    """Parses and checks the body of POST /chat/completions.

    Raises InvalidFormatError (400) for the first wrong type or missing field, and only when there is none
    InvalidParametersError (422) for the first wrong value. Never raises anything else, whatever the bytes.
    """
    parsed = parse_object(raw, max_body_bytes)
    _refuse_crowds(parsed, served)
    body = shapes.read(parsed)
    if body.model not in served:
        raise errors.model_not_found(body.model, served)
    _, most_output = served[body.model]
    messages, continue_final = _messages(body.messages)
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "is only possible with stream: true")
    max_tokens = _max_tokens(body, most_output)
    min_tokens = _within("min_tokens", body.min_tokens, 0, most_output, 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise _invalid("min_tokens", f"must not be above max_tokens, but {min_tokens} is above {max_tokens}")
    top_k = _within("top_k", body.top_k, -1, _MOST_TOP_K, 0)
    tools = _tools(body.tools or [])
    tool_choice, forced_function = _tool_choice(body.tool_choice, tools)
    return ChatRequest(
        model=body.model,
        messages=messages,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        max_tokens=max_tokens,
        temperature=_within("temperature", body.temperature, 0, 2, 1.0),
        top_p=_within("top_p", body.top_p, 0, 1, 1.0, above=True),
        top_k=max(0, top_k),  # other servers write "off" as -1
        min_p=_within("min_p", body.min_p, 0, 1, 0.0),
        repetition_penalty=_within("repetition_penalty", body.repetition_penalty, 0, 10, 1.0, above=True),
        frequency_penalty=_within("frequency_penalty", body.frequency_penalty, -2, 2, 0.0),
        presence_penalty=_within("presence_penalty", body.presence_penalty, -2, 2, 0.0),
        stop=_stop(body.stop),
        seed=None if body.seed is None else _within("seed", body.seed, -_SEED, _SEED - 1, 0),
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        continue_final=continue_final,
        n=_within("n", body.n, 1, 8, 1),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=bool(body.logprobs),
        top_logprobs=_top_logprobs(body),
        response_format=_response_format(body.response_format),
        tools=tools,
        tool_choice=tool_choice,
        forced_function=forced_function,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        estimated_prompt_tokens=estimate_prompt_tokens(messages, tools if tool_choice != "none" else ()),
    )


def _refuse_crowds(parsed: Mapping[str, Any], served: ServedModels) -> None:
    """Refuses more messages than any context holds, and more tools than are possible, before each is looked at.

    The one exception from types before values: to check all types of a hundred thousand of them would take a second.
    """
    messages, tools = parsed.get("messages"), parsed.get("tools")
    longest = max((context for context, _ in served.values()), default=0)
    if isinstance(messages, list):
        found = (part for message in messages if isinstance(message, dict) for part in map(message.get, _CROWDS))
        tokens = len(messages) * _TOKENS_OF_A_MESSAGE + sum(len(part) for part in found if isinstance(part, list))
        if tokens > longest:
            raise errors.context_length_exceeded(tokens, longest)
    if isinstance(tools, list) and len(tools) > _MOST_TOOLS:
        raise _invalid("tools", f"must be at most {_MOST_TOOLS}, but it has {len(tools)}")


def _invalid(field: str, rule: str) -> errors.InvalidParametersError:
    return errors.invalid_parameters(f"{field} {rule}.", field)


def _within(field: str, value: Number | None, low: int, high: int, default: Number, *, above: bool = False) -> Number:
    """The value, or the default when it was not given. Raises when it is not in [low, high], or (low, high]."""
    if value is None:
        return default
    if low <= value <= high and not (above and value == low):
        return value
    lowest = f"above {low}" if above else f"from {low}"
    raise _invalid(field, f"must be {lowest} {'and at most' if above else 'to'} {high}, but it is {describe(value)}")


def _max_tokens(body: shapes.Body, most_output: int) -> int | None:
    """Both names mean the same; the newer one wins nothing, because a client that sends two values means neither."""
    found = None
    for field, value in (("max_tokens", body.max_tokens), ("max_completion_tokens", body.max_completion_tokens)):
        if value is not None:
            found = _within(field, value, 1, most_output, 1)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        values = f"but they are {body.max_tokens} and {body.max_completion_tokens}"
        raise _invalid("max_completion_tokens", f"and max_tokens must be equal when both are given, {values}")
    return found


def _messages(given: list[shapes.Message]) -> tuple[tuple[dict[str, Any], ...], bool]:
    """The conversation for a template, and whether the reply continues its last message."""
    if not given:
        raise _invalid("messages", "must have at least one message")
    last = len(given) - 1
    messages = []
    for at, message in enumerate(given):
        field = f"messages[{at}]"
        if message.role not in _ROLES:
            raise _invalid(f"{field}.role", f"must be one of {', '.join(_ROLES)}, but it is {quote(message.role)}")
        if message.prefix and (at != last or message.role != "assistant"):
            raise _invalid(f"{field}.prefix", "is only possible on the last message, and only if the assistant's")
        plain: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _text(f"{field}.content", message.content),
        }
        if message.name is not None:
            plain["name"] = message.name
        if message.role == "assistant" and message.tool_calls:
            plain["tool_calls"] = _tool_calls(field, message.tool_calls)
        if message.role == "tool":
            plain["tool_call_id"] = message.tool_call_id
        messages.append(plain)
    return tuple(messages), bool(given[last].prefix)


def _text(field: str, content: str | list[shapes.TextPart] | None) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        if part.type != "text":
            raise _invalid(f"{field}[{at}].type", f"must be text: only text is possible, not {quote(part.type)}")
    return "\n".join(part.text or "" for part in content)


def _tool_calls(field: str, calls: list[shapes.ToolCall]) -> list[dict[str, Any]]:
    for at, call in enumerate(calls):
        if call.type != "function":
            raise _invalid(f"{field}.tool_calls[{at}].type", f"must be function, but it is {quote(call.type)}")
    return [call.model_dump() for call in calls]


def _stop(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > _MOST_STOPS:
        raise _invalid("stop", f"must have at most {_MOST_STOPS} strings, but it has {len(stops)}")
    if "" in stops:
        raise _invalid("stop", "must not have an empty string")
    return stops


def _logit_bias(given: Mapping[str, Any]) -> dict[int, float] | None:
    for token, value in given.items():
        if not _TOKEN_ID.fullmatch(token):
            raise _invalid("logit_bias", f"must have token ids as names, but one is {quote(token)}")
        _within(f"logit_bias.{token}", value, -100, 100, 0)
    return {int(token): float(value) for token, value in given.items()} or None


def _top_logprobs(body: shapes.Body) -> int:
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs", "is only possible with logprobs: true")
    return _within("top_logprobs", body.top_logprobs, 0, 20, 0)


def _response_format(given: shapes.ResponseFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type not in ("json_object", "json_schema"):
        kinds = "text, json_object or json_schema"
        raise _invalid("response_format.type", f"must be {kinds}, but it is {quote(given.type)}")
    if given.json_schema is None or given.type == "json_object":
        return {"type": given.type}
    _check_name("response_format.json_schema.name", given.json_schema["name"])
    json_schemas.check("response_format.json_schema.schema", given.json_schema["schema"])
    return {"type": given.type, "json_schema": given.json_schema}


def _tools(given: list[shapes.Tool]) -> tuple[dict[str, Any], ...]:
    names: set[str] = set()
    for at, tool in enumerate(given):
        if tool.type != "function" or tool.function is None:
            raise _invalid(f"tools[{at}].type", f"must be function, but it is {quote(tool.type)}")
        name = tool.function.name
        _check_name(f"tools[{at}].function.name", name)
        if name in names:
            raise _invalid(f"tools[{at}].function.name", f"must not repeat, but {name} is there twice")
        names.add(name)
    json_schemas.check_tools(
        [
            (f"tools[{at}].function.parameters", tool.function.parameters)
            for at, tool in enumerate(given)
            if tool.function
        ]
    )
    return tuple(tool.model_dump(exclude_none=True) for tool in given)


def _check_name(field: str, name: str) -> None:
    if not _FUNCTION_NAME.fullmatch(name):
        raise _invalid(field, f"must be 1 to 64 of A-Z, a-z, 0-9, _ and -, but it is {quote(name)}")


def _tool_choice(
    given: str | shapes.NamedTool | None, tools: Iterable[Mapping[str, Any]]
) -> tuple[ToolChoice, str | None]:
    names = [tool["function"]["name"] for tool in tools]
    if given is None:
        return ("auto" if names else "none"), None
    if isinstance(given, shapes.NamedTool):
        name = given.function.name
        if given.type != "function":
            raise _invalid("tool_choice.type", f"must be function, but it is {quote(given.type)}")
        if name not in names:
            raise _invalid("tool_choice.function.name", f"must name one of the tools, but it is {quote(name)}")
        return "required", name
    if given not in _TOOL_CHOICES:
        raise _invalid("tool_choice", f"must be none, auto, required or a function, but it is {quote(given)}")
    if given == "required" and not names:
        raise _invalid("tool_choice", "can be required only when tools are given")
    return _TOOL_CHOICES[given], None
