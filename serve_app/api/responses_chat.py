"""Translates requests of POST /responses to the chat format, and the field names in errors back to this format.

Consecutive items of the model (reasoning, text, calls) become one assistant message, as chat templates expect.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import PrivateAttr

from serve_app.api import errors
from serve_app.api.chat_request import ChatRequest, ServedModels, check_chat_request
from serve_app.api.codec import FirstFault, Shape, encode_json, parse_object, quote, typed
from serve_app.api.errors import ApiError
from serve_app.api.json_schemas import MAX_BYTES_OF_TOOLS
from serve_app.api.responses_request import (
    AnyItem,
    CustomTool,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    InputMessage,
    Item,
    ItemReference,
    NamespaceTool,
    OtherTool,
    ReasoningItem,
    ResponsesRequest,
    Tool,
    ToolChoice,
    check_responses_request,
)
from serve_app.api.tools_and_formats import MAX_TOOLS, check_name, invalid

ID_PREFIX: Final = "resp_"
MAX_REFERENCES: Final = 32
MAX_REFERRED: Final = 4 * 1024 * 1024  # bytes of the items that a request refers to, as JSON
_MAX_NAME: Final = 64
_MAX_NAMESPACE: Final = 256
_MAX_NAMESPACE_DESCRIPTION: Final = 16 * 1024
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")
_ITEM_ID: Final = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_i?[0-9]+")
EXTENSIONS: Final = (
    *("seed", "stop", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
)
"""Fields of the chat format that OpenAI's format does not have. They have the same meaning here."""
_FIELDS: Final = (
    (re.compile(r"^messages(\[.*)?$"), "input"),
    (re.compile(r"^response_format\.json_schema\.(?=\w)"), "text.format."),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^tool_choice\.function\.name"), "tool_choice.name"),
    (re.compile(r"^max_tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
)
"""Fields of the chat format, and their names in this format."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A stored response: the items of its input, and the response itself."""

    items: Sequence[Json]
    response: Json
    size: int = field(default=0, compare=False)  # bytes, as JSON


Stored = Mapping[str, StoredConversation]
"""Stored conversations by response id."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool as the client names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    field: str = ""  # its place in the request, such as tools[2]


@dataclass(slots=True)
class Tools:
    """The tools of a request. `names` has the tools by the name that the model sees, in the order of `functions`."""

    functions: list[Json] = field(default_factory=list)  # in the chat format
    names: dict[str, NamedTool] = field(default_factory=dict)
    echoed: list[Json] = field(default_factory=list)  # in the form in which the reply repeats them
    omitted: list[str] = field(default_factory=list)  # types of the tools that are left out, each once
    bytes_of_formats: int = 0  # size of all custom tools' formats as JSON, which the reply repeats


class ResponsesChat(ChatRequest):
    """A request to POST /responses in the chat format, with the fields that its reply repeats."""

    _sent: ResponsesRequest = PrivateAttr()
    _tools: Tools = PrivateAttr()
    _items: list[Json] = PrivateAttr()

    @property
    def sent(self) -> ResponsesRequest:
        return self._sent

    @property
    def tool_names(self) -> Tools:
        return self._tools

    @property
    def items(self) -> list[Json]:
        """All items of the conversation before the reply, including those of earlier responses."""
        return self._items

    def named(self, error: ApiError) -> ApiError:
        """Returns an error about chat fields with the field names of this format."""
        return _renamed(error, self._tools)


def digits_of(response_id: str) -> str:
    """Returns the digits of a response's id, which are also in the ids of its items."""
    return response_id.removeprefix(ID_PREFIX)


def read_responses_request(
    raw: bytes, served: ServedModels, max_bytes: int, max_items: int
) -> tuple[Json, ResponsesRequest]:
    """Parses and checks a body. Returns its JSON and the request. Raises ApiError."""
    parsed = parse_object(raw, max_bytes, max_items)
    return parsed, check_responses_request(parsed, served)


def stored_ids(request: ResponsesRequest) -> list[str]:
    """Returns the ids of the stored responses that a request refers to, at most MAX_REFERENCES. Raises ApiError."""
    found = [] if request.previous_response_id is None else [request.previous_response_id]
    for at, item in enumerate(request.input):
        if isinstance(item, ItemReference):
            matched = _ITEM_ID.fullmatch(item.id)
            if matched is None:
                raise item_not_found(f"input[{at}].id", item.id)
            found.append(ID_PREFIX + matched[1])
    found = list(dict.fromkeys(found))
    if len(found) > MAX_REFERENCES:
        raise invalid("input", f"must refer to items of at most {MAX_REFERENCES} responses, not {len(found)}")
    return found


def previous_response_not_found(response_id: str) -> ApiError:
    message = (
        f"The response {quote(response_id)} is not stored: it does not exist, was created with store: false, has been "
        "deleted, or has expired. Send the whole conversation in input."
    )
    return ApiError(404, message, "previous_response_not_found", "previous_response_id")


def item_not_found(field: str, item_id: str) -> ApiError:
    return invalid(field, f"must be the id of an item of a stored response, but {quote(item_id)} is not stored")


def to_chat(parsed: Json, request: ResponsesRequest, served: ServedModels, stored: Stored) -> ResponsesChat:
    """Returns the request in the chat format. Raises ApiError with the names of this format."""
    tools = _tools(request.tools)
    items, typed_items = _conversation(parsed, request, served, stored)
    body: Json = {name: parsed[name] for name in EXTENSIONS if parsed.get(name) is not None}
    sent = request.model_fields_set
    body |= {name: getattr(request, name) for name in ("temperature", "top_p") if name in sent}
    body |= {
        "model": request.model,
        "messages": _messages(request, typed_items),
        "stream": request.stream,
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    if request.resume:
        body["stream_options"] = {"resume": True}
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if (form := request.text and request.text.format) and form.type != "text":
        body["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            schema = {"name": form.name, "schema": form.sent_schema, "strict": form.strict}
            body["response_format"]["json_schema"] = schema
    body |= _choice(request.tool_choice, tools)
    try:
        chat = check_chat_request(body, served, ResponsesChat)
    except ApiError as error:
        raise _renamed(error, tools) from None
    chat._sent, chat._tools, chat._items = request, tools, items
    return chat


class _Items(Shape):
    """Stored items."""

    items: Annotated[list[AnyItem], FirstFault()]


def _conversation(
    parsed: Json, request: ResponsesRequest, served: ServedModels, stored: Stored
) -> tuple[list[Json], list[Item]]:
    """Returns all items twice, as JSON and as typed objects: the previous response's items, then those of the input."""
    items: list[Json] = []
    if (previous := request.previous_response_id) is not None:
        if (found := stored.get(previous)) is None:
            raise previous_response_not_found(previous)
        items += [*found.items, *found.response["output"]]
        longest = max(context for context, _ in served.values())
        if len(items) > longest:
            raise errors.context_length_exceeded(0, longest)
    typed_items = _typed(items)
    if isinstance(request.input, str):
        message = {"type": "message", "role": "user", "content": request.input}
        return [*items, message], [*typed_items, *_typed([message])]
    referred = _Referred(stored)
    for at, (item, given) in enumerate(zip(request.input, parsed["input"], strict=True)):
        if isinstance(item, ItemReference):
            given, item = referred.find(f"input[{at}].id", item.id)
        items.append(given)
        typed_items.append(item)
    return items, typed_items


def _typed(items: Sequence[Json]) -> list[Item]:
    return typed(_Items, {"items": list(items)}).items if items else []


class _Referred:
    """The stored items that a request refers to.

    Limits their total size, because a short body may refer to a long item thousands of times.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._left = MAX_REFERRED
        self._found: dict[str, tuple[Json, Item, int]] = {}  # by id: JSON, typed, size in bytes

    def find(self, field: str, item_id: str) -> tuple[Json, Item]:
        """Returns an item twice, as JSON and as a typed object. Raises ApiError (422)."""
        if item_id not in self._found:
            self._found[item_id] = self._read(field, item_id)
        given, item, size = self._found[item_id]
        self._left -= size
        if self._left < 0:
            raise invalid("input", f"must not refer to items of more than {MAX_REFERRED} bytes together")
        return given, item

    def _read(self, field: str, item_id: str) -> tuple[Json, Item, int]:
        matched = _ITEM_ID.fullmatch(item_id)
        found = None if matched is None else self._stored.get(ID_PREFIX + matched[1])
        for item in () if found is None else (*found.items, *found.response["output"]):
            if item.get("id") == item_id:
                [checked] = _typed([item])
                return item, checked, len(encode_json(item))
        raise item_not_found(field, item_id)


def _messages(request: ResponsesRequest, items: Sequence[Item]) -> list[Json]:
    turns = _Turns()
    if request.instructions:
        turns.add_message("system", request.instructions)
    for item in items:
        turns.add(item)
    return turns.end()


class _Turns:
    """Collects items as chat messages."""

    def __init__(self) -> None:
        self.messages: list[Json] = []  # the texts of the last message may be lists of pieces

    def add(self, item: Item) -> None:
        if isinstance(item, InputMessage):
            self.add_message(item.role, _text(item.content))
        elif isinstance(item, ReasoningItem):
            self._join("reasoning_content", item.plain())
        elif isinstance(item, FunctionCallItem):
            self._call(item.call_id, model_name(item.name, item.namespace), item.arguments)
        elif isinstance(item, CustomToolCallItem):
            arguments = json.dumps({"input": item.input}, ensure_ascii=False)
            self._call(item.call_id, model_name(item.name, item.namespace), arguments)
        elif isinstance(item, FunctionCallOutputItem | CustomToolCallOutputItem):
            self._append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})

    def add_message(self, role: str, text: str) -> None:
        """Adds a message. Instructions at the beginning become one message, because many templates allow only one."""
        if role == "assistant":
            self._join("content", text)
        elif role != "user" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"].append(text)
        else:
            self._append({"role": "user" if role == "user" else "system", "content": [text]})

    def end(self) -> list[Json]:
        """Returns the messages. Leaves out reasoning that is not followed by text or calls, as templates do."""
        self._close()
        return self.messages

    def _append(self, message: Json) -> None:
        self._close()
        self.messages.append(message)

    def _close(self) -> None:
        """Ends the last message: joins its pieces, or drops it if it is only reasoning."""
        last = self.messages[-1] if self.messages else {}
        if last.keys() == {"role", "reasoning_content"}:
            self.messages.pop()
            return
        for name in ("content", "reasoning_content"):
            if isinstance(last.get(name), list):
                last[name] = ("\n\n" if last["role"] == "system" else "\n").join(last[name])

    def _turn(self) -> Json:
        """Returns the assistant's message that is being collected."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._append({"role": "assistant"})
        return self.messages[-1]

    def _join(self, name: str, text: str) -> None:
        self._turn().setdefault(name, []).append(text)  # joined at the end, as there may be thousands of pieces

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.plain() for part in content)


def model_name(name: str, namespace: str | None) -> str:
    """Returns the name under which the model sees a tool: at most 64 characters, even with a namespace."""
    if namespace is None:
        return name
    joined = f"{namespace.rstrip('_')}__{name}"
    shown = _NOT_IN_A_NAME.sub("_", joined[: _MAX_NAME + 1])
    if len(shown) <= _MAX_NAME:
        return shown
    return f"{shown[: _MAX_NAME - 9]}_{hashlib.sha256(joined.encode()).hexdigest()[:8]}"


def _tools(given: Sequence[Tool]) -> Tools:
    """Returns the tools that the model can call. Raises ApiError (422) if two tools have the same name."""
    tools = Tools()
    for at, tool in enumerate(given):
        if isinstance(tool, OtherTool):
            _omit(tools, tool.type)
        elif isinstance(tool, NamespaceTool):
            _check_namespace(f"tools[{at}]", tool)
            inner_tools: list[Json] = []
            for number, inner in enumerate(tool.tools):
                if isinstance(inner, OtherTool):
                    _omit(tools, inner.type)
                else:
                    inner_tools.append(_add_tool(tools, f"tools[{at}].tools[{number}]", inner, tool))
            about = {"name": tool.name, "description": tool.description or ""}
            tools.echoed.append({"type": "namespace", **about, "tools": inner_tools})
        else:
            tools.echoed.append(_add_tool(tools, f"tools[{at}]", tool))
    return tools


def _check_namespace(field: str, tool: NamespaceTool) -> None:
    """Checks the length of a namespace's name and description, which each of its tools repeats. Raises ApiError."""
    for name, text, most in (
        ("name", tool.name, _MAX_NAMESPACE),
        ("description", tool.description or "", _MAX_NAMESPACE_DESCRIPTION),
    ):
        if len(text) > most:
            raise invalid(f"{field}.{name}", f"must have at most {most} characters, but it has {len(text)}")


def _omit(tools: Tools, kind: str) -> None:
    if kind not in tools.omitted:
        tools.omitted.append(kind)


def _add_tool(
    tools: Tools, field: str, tool: FunctionTool | CustomTool, namespace: NamespaceTool | None = None
) -> Json:
    """Adds a tool. Returns it in the form in which the reply repeats it."""
    check_name(f"{field}.name", tool.name)
    name = model_name(tool.name, None if namespace is None else namespace.name)
    if name in tools.names:
        raise invalid(f"{field}.name", f"must not repeat, but {quote(tool.name)} is there twice")
    is_custom = isinstance(tool, CustomTool)
    tools.names[name] = NamedTool(tool.name, None if namespace is None else namespace.name, is_custom, field)
    about = [namespace.description if namespace is not None else None, tool.description]
    function: Json = {"name": name}
    echoed: Json = {"type": tool.type, "name": tool.name, "description": tool.description}
    if isinstance(tool, FunctionTool):
        function |= {"parameters": tool.parameters, "strict": tool.strict}
        echoed |= {"parameters": tool.parameters, "strict": bool(tool.strict)}
    else:
        about.append(_format_text(tool.format))
        function["parameters"] = {
            "type": "object",
            "properties": {"input": {"type": "string", "description": "The input of the tool, as text."}},
            "required": ["input"],
        }
        if tool.format is not None:
            echoed["format"] = tool.format
            tools.bytes_of_formats += len(encode_json(tool.format))
            if tools.bytes_of_formats > MAX_BYTES_OF_TOOLS:
                raise invalid(f"{field}.format", f"must be at most {MAX_BYTES_OF_TOOLS} bytes for all tools together")
    function["description"] = "\n\n".join(text for text in about if text) or None
    tools.functions.append({"type": "function", "function": function})
    return echoed


def _format_text(given: Mapping[str, Any] | None) -> str | None:
    """Returns the text that tells the model a custom tool's format; None if there is no grammar."""
    if given is None or not isinstance(given.get("definition"), str):
        return None
    return f"The input matches this {given.get('syntax') or 'lark'} grammar:\n{given['definition']}"


def _choice(choice: str | ToolChoice | None, tools: Tools) -> Json:
    """Returns `tools` and `tool_choice` of the chat format. Raises ApiError (422) if the choice can't be followed."""
    if not isinstance(choice, ToolChoice):
        if choice == "required" and not tools.functions and tools.omitted:
            names = ", ".join(map(quote, tools.omitted))
            raise invalid("tool_choice", f"can't be 'required', because {names} are not supported. Send a function")
        found: Json = {"tools": tools.functions} if tools.functions else {}
        return found if choice is None or (choice != "required" and not found) else found | {"tool_choice": choice}
    if choice.type != "allowed_tools":
        name = _named("tool_choice.name", choice.type, choice.name or "", choice.namespace, tools)
        return {"tools": tools.functions, "tool_choice": {"type": "function", "function": {"name": name}}}
    wanted = []
    if len(choice.tools or ()) > MAX_TOOLS:
        raise invalid(
            "tool_choice.tools", f"must have at most {MAX_TOOLS} entries, but it has {len(choice.tools or ())}"
        )
    for at, one in enumerate(choice.tools or ()):
        if one.type in ("function", "custom"):
            wanted.append(_named(f"tool_choice.tools[{at}].name", one.type, one.name or "", one.namespace, tools))
        elif choice.mode == "required" and one.type not in tools.omitted:
            raise invalid(f"tool_choice.tools[{at}]", f"must name one of the tools, but it is {quote(one.type)}")
    if not wanted:
        if choice.mode == "required":
            raise invalid("tool_choice.tools", "must name a function or custom tool, because the mode is 'required'")
        return {"tools": tools.functions, "tool_choice": "none"} if tools.functions else {}
    allowed = [tool for tool in tools.functions if tool["function"]["name"] in wanted]
    return {"tools": allowed, "tool_choice": choice.mode}


def _named(field: str, kind: str, name: str, namespace: str | None, tools: Tools) -> str:
    """Returns the name under which the model sees the tool that a tool choice names. Raises ApiError (422)."""
    for shown, tool in tools.names.items():
        if tool.name == name and tool.is_custom == (kind == "custom") and namespace in (None, tool.namespace):
            return shown
    raise invalid(field, f"must name one of the tools of type {kind}, but it is {quote(name)}")


_TOOL_FIELD: Final = re.compile(r"^tools\[(\d+)\]\.function")


def _renamed(error: ApiError, tools: Tools) -> ApiError:
    """Returns an error about chat fields with the field names of this format."""
    param = error.param
    if param is None or error.code in ("idempotency_key_reused", "idempotency_in_progress"):
        return error
    renamed = param
    if matched := _TOOL_FIELD.match(param):
        fields = [tool.field for tool in tools.names.values()]
        at = int(matched[1])
        renamed = (fields[at] if at < len(fields) else "tools") + param[matched.end() :]
    for pattern, name in _FIELDS:
        renamed = pattern.sub(name, renamed)
    message = error.message.replace(param, renamed, 1) if error.message.startswith(param) else error.message
    return ApiError(error.status, message, error.code, renamed, error.headers)
