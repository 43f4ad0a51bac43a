"""Declares the fields of a request in the Messages format, and translates a body to the chat format.

The chat format's rules and limits then apply. Only values in which the two formats differ are checked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field, Tag

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest, Number, ServedModels, StreamOptions, check_chat_request
from serve_app.api.codec import FirstFault, Shape, either, keywords, parse_object, quote, typed
from serve_app.api.field_checks import OnlyWith, Range
from serve_app.api.served_names import identifier_of
from serve_app.api.tools_and_formats import MAX_TOOLS, invalid

BLOCKS: Final = {
    "TextBlock": ("Text.", "text", ["text"]),
    "ToolUseBlock": ("A call that the assistant made.", "tool_use", ["id", "name", "input"]),
    "ToolResultBlock": ("The result of a call, from the user.", "tool_result", ["tool_use_id"]),
    "ThinkingBlock": ("Reasoning of an earlier reply. The model does not see it.", "thinking", []),
    "RedactedThinkingBlock": ("Reasoning of an earlier reply. The model does not see it.", "redacted_thinking", []),
}
"""Description, type and required fields by kind of content block."""

ROLES: Final = ("user", "assistant", "system")
TOOL_CHOICES: Final = ("auto", "any", "tool", "none")
THINKING: Final = ("enabled", "disabled", "adaptive")
ERROR_PREFIX: Final = "Error: "
"""Prefix of the content of a result with `is_error`."""

_TYPES: Final = tuple(kind for _, kind, _ in BLOCKS.values())
_THOUGHTS: Final = ("thinking", "redacted_thinking")
_MAX_STOPS: Final = 16

_Text = Annotated[str, Tag("<string>")]


class TextOfBlock(Shape):
    """A block of text."""

    type: Annotated[str, keywords(const="text")]
    text: str


_Blocks = Annotated[list[TextOfBlock], FirstFault(), Tag("<array>")]


class ContentBlock(Shape):
    """A part of a message. The required fields depend on its type."""

    type: str
    text: str | None = None
    """Text of the block. Blocks are joined by line feeds."""
    id: str | None = None
    """Id of the call. It is the `tool_use_id` of the block with the result."""
    name: str | None = None
    """Name of the tool."""
    input: dict[str, Any] | None = None
    """Arguments of the call."""
    tool_use_id: str | None = None
    """Id of the call that this block answers."""
    content: Annotated[_Text | _Blocks, either("string_or_parts")] | None = None
    """The result."""
    is_error: Annotated[bool | None, keywords(default=False)] = None
    """The call failed. The model sees `Error: ` before the result."""


class InputMessage(Shape):
    """One message of the conversation. Adjacent messages of one role are joined."""

    role: Annotated[str, keywords(enum=list(ROLES))]
    content: Annotated[_Text | Annotated[list[ContentBlock], FirstFault(), Tag("<array>")], either("string_or_parts")]
    """Text, or blocks."""


class CustomTool(Shape):
    """A tool that the client runs."""

    type: Annotated[str | None, keywords(enum=["custom", None])] = None
    name: Annotated[str | None, keywords(pattern="^[A-Za-z0-9_-]{1,64}$")] = None
    description: str | None = None
    """Tells the model what the tool does and when to call it."""
    input_schema: dict[str, Any] | None = None
    """JSON Schema of the input, of type object."""
    strict: Annotated[bool | None, keywords(default=False)] = None
    """Enforce `input_schema`."""


class ToolChoice(Shape):
    """Whether the reply calls tools."""

    type: Annotated[str, keywords(enum=list(TOOL_CHOICES))]
    """`auto`: the model decides. `any`: at least one call. `tool`: a call of the tool `name`. `none`: no call."""
    name: str | None = None
    """For `tool`: the name of one of `tools`."""
    disable_parallel_tool_use: Annotated[bool | None, keywords(default=False)] = None
    """Allow at most one call per reply. Enforced with `any` and `tool`; with `auto`, only if a tool has `strict` or the
    reply has an enforced format."""


class Thinking(Shape):
    """Whether the reply shows the model's reasoning."""

    type: Annotated[str, keywords(enum=list(THINKING))]
    budget_tokens: int | None = None
    """Ignored: the model decides how long it reasons. Reasoning counts towards `max_tokens`."""
    display: str | None = None
    """`omitted`: same as `disabled`."""


class Metadata(Shape):
    """Data about the request."""

    user_id: str | None = None
    """Ignored."""


class OutputFormat(Shape):
    """The form of the reply."""

    type: Annotated[str, keywords(const="json_schema")]
    sent_schema: dict[str, Any] = Field(alias="schema")
    """A JSON Schema, which is enforced. A keyword that cannot be enforced is an error."""


class OutputConfig(Shape):
    """Settings of the output."""

    format: OutputFormat | None = None
    """The form of the reply. Default: text."""
    effort: str | None = None
    """Ignored."""


class MessagesRequest(Shape):
    """The body of POST /messages."""

    model: str
    """A model identifier from `/models`."""
    max_tokens: Annotated[int, keywords(minimum=1)]
    """Maximum number of tokens of the reply. Values above the model's limit count as the limit."""
    messages: Annotated[list[InputMessage], FirstFault(), keywords(minItems=1)]
    """Messages of the conversation. If the last one is the assistant's, the reply continues it."""
    system: Annotated[_Text | _Blocks, either("string_or_parts")] | None = None
    """Instructions for the model."""
    stream: Annotated[bool | None, keywords(default=False)] = None
    """Stream the reply as server-sent events."""
    stream_options: Annotated[StreamOptions | None, OnlyWith("stream")] = None
    """Extension: only `resume` has an effect. Requires `stream: true`."""
    temperature: Annotated[Number | None, Range(0, 1)] = None
    """Sampling temperature. 0 always picks the most likely token."""
    top_p: Annotated[Number | None, Range(0, 1, above=True)] = None
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    top_k: Annotated[int | None, Range(0, 1_000_000)] = None
    """Sample from this number of most likely tokens. 0: off."""
    stop_sequences: Annotated[
        list[Annotated[str, keywords(minLength=1)]] | None, FirstFault(), keywords(maxItems=_MAX_STOPS)
    ] = None
    """Strings that end the reply. The reply does not contain them; `stop_sequence` says which one ended it."""
    tools: Annotated[list[CustomTool] | None, FirstFault(), keywords(maxItems=MAX_TOOLS)] = None
    """Tools that the model may call. Names are unique."""
    tool_choice: ToolChoice | None = None
    """Default: `auto` with tools."""
    thinking: Thinking | None = None
    """`enabled` or `adaptive`: show the reasoning of a model that reasons. Default: `disabled`."""
    metadata: Metadata | None = None
    """Ignored."""
    output_config: OutputConfig | None = None
    """Form of the reply."""


class MessagesChat(ChatRequest):
    """A request in the Messages format, translated to the chat format."""

    shows_thinking: bool = False


def parse_messages_request(parsed: dict[str, Any], served: ServedModels) -> MessagesChat:
    """Checks a parsed JSON body of POST /messages. Raises ApiError as `check_chat_request` does."""
    given = {name: value for name, value in parsed.items() if value is not None}
    _refuse_too_many(given, served)
    _refuse_foreign(given)
    request = typed(MessagesRequest, given)
    identifier = identifier_of(request.model, served)
    _, most_output = served.get(identifier, (0, request.max_tokens))  # `check_chat_request` rejects unknown models
    return check_chat_request(_chat(request, most_output), served, MessagesChat)


def parse_count_request(raw: bytes, served: ServedModels, max_bytes: int, max_items: int) -> MessagesChat:
    """Parses a body of POST /messages/count_tokens, which needs no `max_tokens`."""
    parsed = parse_object(raw, max_bytes, max_items)
    return parse_messages_request({**parsed, "max_tokens": 1, "stream": None, "stream_options": None}, served)


def _refuse_too_many(given: Mapping[str, Any], served: ServedModels) -> None:
    """Rejects a request with too many messages and blocks for the longest context, or with too many tools.

    It runs before the types of messages and tools are checked.
    """
    longest = max((context for context, _ in served.values()), default=0)
    messages, tools = given.get("messages"), given.get("tools")
    if isinstance(messages, list):
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        if len(messages) + sum(len(content) for content in contents if isinstance(content, list)) > longest:
            raise errors.context_length_exceeded(0, longest)
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"must have at most {MAX_TOOLS} entries, but it has {len(tools)}")


def _refuse_foreign(given: Mapping[str, Any]) -> None:
    """Rejects fields that would change the reply and that this service does not support."""
    if given.get("mcp_servers"):
        raise invalid("mcp_servers", "is not supported: call the servers yourself, and send their tools in tools")
    if given.get("output_format") is not None:
        raise invalid("output_format", "is not a field here. Send its value in output_config.format")


def _chat(request: MessagesRequest, most_output: int) -> dict[str, Any]:
    """Returns the request in the chat format."""
    _check(request)
    chat: dict[str, Any] = {
        "model": request.model,
        "messages": [*_system(request.system), *_messages(request.messages)],
        "max_tokens": min(request.max_tokens, most_output),
        "stream": request.stream is True,
        "shows_thinking": _shows(request.thinking),
    }
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(request, name)) is not None:
            chat[name] = value
    if request.stop_sequences:
        chat["stop"] = request.stop_sequences
    if request.stream_options is not None and request.stream_options.resume:
        chat["stream_options"] = {"resume": True}
    if request.tools:
        chat["tools"] = [_tool(tool) for tool in request.tools]
    if (choice := request.tool_choice) is not None:
        chat["tool_choice"] = _choice(choice)
        chat["parallel_tool_calls"] = choice.disable_parallel_tool_use is not True
    config = request.output_config
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.sent_schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _check(request: MessagesRequest) -> None:
    """Checks rules that only this format has, and fields that have another name in the chat format.

    Raises ApiError: 422, or 400 if a required field is missing.
    """
    if request.max_tokens < 1:
        raise invalid("max_tokens", f"must be at least 1, but it is {request.max_tokens}")
    for name, field in MessagesRequest.model_fields.items():
        value = getattr(request, name)
        for marker in field.metadata if value is not None else ():
            if isinstance(marker, Range):
                marker.check_value(name, value)
            elif isinstance(marker, OnlyWith) and not getattr(request, marker.flag):
                raise invalid(name, f"is only possible with {marker.flag}: true")
    _check_messages(request.messages)
    if isinstance(request.system, list):
        _check_text_blocks("system", request.system)
    stops = request.stop_sequences or []
    if len(stops) > _MAX_STOPS:
        raise invalid("stop_sequences", f"must have at most {_MAX_STOPS} strings, but it has {len(stops)}")
    if "" in stops:
        raise invalid("stop_sequences", "must not have an empty string")
    for at, tool in enumerate(request.tools or []):
        _check_tool(f"tools[{at}]", tool)
    if request.tool_choice is not None:
        _check_choice(request.tool_choice, request.tools or [])
    if request.thinking is not None and request.thinking.type not in THINKING:
        rule = f"must be one of {', '.join(THINKING)}, but it is {quote(request.thinking.type)}"
        raise invalid("thinking.type", rule)
    config = request.output_config
    if config is not None and config.format is not None and config.format.type != "json_schema":
        raise invalid("output_config.format.type", f"must be json_schema, but it is {quote(config.format.type)}")


def _check_messages(messages: Sequence[InputMessage]) -> None:
    if not messages:
        raise invalid("messages", "must have at least one message")
    for at, message in enumerate(messages):
        if message.role not in ROLES:
            rule = f"must be one of {', '.join(ROLES)}, but it is {quote(message.role)}"
            raise invalid(f"messages[{at}].role", rule)
        for number, block in enumerate(message.content if isinstance(message.content, list) else ()):
            _check_block(f"messages[{at}].content[{number}]", message.role, block)
    last = messages[-1]
    if last.role == "assistant" and any(block.type == "tool_use" for block in _blocks(last)):
        at = len(messages) - 1
        raise invalid(f"messages[{at}]", "has tool_use, so a message with the tool_result must follow")


def _check_block(field: str, role: str, block: ContentBlock) -> None:
    if block.type not in _TYPES:
        raise invalid(f"{field}.type", f"is {quote(block.type)}, which the model can't read. Send its content as text")
    for _, kind, required in BLOCKS.values():
        for name in required if kind == block.type else ():
            if getattr(block, name) is None:
                raise errors.invalid_format(
                    f"{field}.{name} is missing: the type {quote(kind)} requires it.", f"{field}.{name}"
                )
    owner = "user" if block.type == "tool_result" else "assistant"
    if block.type != "text" and role != owner:
        raise invalid(f"{field}.type", f"{quote(block.type)} is only possible in a message with the role {owner}")
    if isinstance(block.content, list):
        _check_text_blocks(f"{field}.content", block.content)


def _check_text_blocks(field: str, blocks: Sequence[TextOfBlock]) -> None:
    for at, block in enumerate(blocks):
        if block.type != "text":
            raise invalid(f"{field}[{at}].type", f"is {quote(block.type)}, which the model can't read. Send text")


def _check_tool(field: str, tool: CustomTool) -> None:
    if tool.type not in (None, "custom"):
        rule = f"is {quote(tool.type or '')}, a tool that this service does not run. Remove it, or send a tool with "
        raise invalid(f"{field}.type", f"{rule}name and input_schema and run it yourself")
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise errors.invalid_format(f"{field}.{name} is missing: it is required here.", f"{field}.{name}")


def _check_choice(choice: ToolChoice, tools: Sequence[CustomTool]) -> None:
    if choice.type not in TOOL_CHOICES:
        raise invalid("tool_choice.type", f"must be one of {', '.join(TOOL_CHOICES)}, but it is {quote(choice.type)}")
    if choice.type == "any" and not tools:
        raise invalid("tool_choice.type", "must not be 'any' without tools")
    if choice.type == "tool":
        if choice.name is None:
            raise errors.invalid_format("tool_choice.name is missing: the type 'tool' requires it.", "tool_choice.name")
        if choice.name not in {tool.name for tool in tools}:
            raise invalid("tool_choice.name", f"must name one of the tools, but it is {quote(choice.name)}")


def _shows(thinking: Thinking | None) -> bool:
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def _system(system: str | list[TextOfBlock] | None) -> Iterator[dict[str, Any]]:
    if system:
        yield {"role": "system", "content": system if isinstance(system, str) else _joined(system)}


def _joined(blocks: Sequence[TextOfBlock | ContentBlock]) -> str:
    return "\n".join(block.text or "" for block in blocks)


def _messages(messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """Returns the conversation as chat messages, with adjacent messages of one role joined."""
    turns: list[tuple[str, list[ContentBlock]]] = []
    for message in messages:
        if not turns or turns[-1][0] != message.role:
            turns.append((message.role, []))
        turns[-1][1].extend(_blocks(message))
    chat = [one for role, blocks in turns for one in _turn(role, blocks)]
    if turns[-1][0] == "assistant":
        if chat[-1]["content"]:
            chat[-1]["prefix"] = True
        else:
            chat.pop()  # an empty message cannot be continued
    return chat


def _turn(role: str, blocks: Sequence[ContentBlock]) -> Iterable[dict[str, Any]]:
    if role == "user":
        return _user(blocks)
    return [_assistant(blocks) if role == "assistant" else {"role": role, "content": _joined(blocks)}]


def _blocks(message: InputMessage) -> list[ContentBlock]:
    content = message.content
    return [ContentBlock(type="text", text=content)] if isinstance(content, str) else content


def _user(blocks: Sequence[ContentBlock]) -> Iterator[dict[str, Any]]:
    """Yields the chat messages of a user turn: one for each result of a call, and one for the text between results."""
    text: list[ContentBlock] = []
    has_result = False
    for block in blocks:
        if block.type == "text":
            text.append(block)
            continue
        if text:
            yield {"role": "user", "content": _joined(text)}
            text = []
        has_result = True
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    if text or not has_result:
        yield {"role": "user", "content": _joined(text)}


def _result(block: ContentBlock) -> str:
    text = block.content if isinstance(block.content, str) else _joined(block.content or [])
    return f"{ERROR_PREFIX}{text}" if block.is_error else text


def _assistant(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _joined([b for b in blocks if b.type == "text"])}
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    return {**message, "tool_calls": calls} if calls else message


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
