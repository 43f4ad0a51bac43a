"""Messages of a conversation: their types, and the checks of their values."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Tag, model_validator

from serve_app.api.codec import FirstFault, Shape, either, keywords, missing, quote
from serve_app.api.tools_and_formats import ToolCall, check_arguments, check_tool_calls, invalid

MESSAGES: Final = {
    "SystemMessage": ("Instructions. `developer` counts as `system`.", ["system", "developer"], []),
    "UserMessage": ("What the user says.", ["user"], []),
    "AssistantMessage": (
        "An earlier message of the model, or the beginning of its next one.",
        ["assistant"],
        ["tool_calls", "prefix", "reasoning_content"],
    ),
    "ToolMessage": ("The result of a call.", ["tool"], ["tool_call_id"]),
}
"""Description, roles and fields by kind of message. Every kind also has `content` and `name`."""

_ROLES: Final = tuple(role for _, roles, _ in MESSAGES.values() for role in roles)

_Text = Annotated[str, Tag("<string>")]


class TextPart(Shape):
    """One part of a message's content."""

    type: Annotated[str, keywords(const="text")]
    text: str | None = None
    """Text of the part. Parts are joined by line feeds."""

    @model_validator(mode="after")
    def _complete(self) -> TextPart:
        if self.type == "text" and self.text is None:
            missing("text")
        return self


_Content = Annotated[_Text | Annotated[list[TextPart], FirstFault(), Tag("<array>")], either("string_or_parts")]


class Message(Shape):
    """One message. The required fields depend on its role."""

    role: str
    content: _Content | None = None
    """Text of the message. Optional only for an assistant message with `tool_calls`."""
    name: str | None = None
    """Name of the participant, to tell participants of one role apart."""
    tool_calls: Annotated[list[ToolCall], FirstFault()] | None = None
    """Tool calls of an earlier reply."""
    tool_call_id: str | None = None
    """The `id` of the tool call that this message answers."""
    reasoning_content: str | None = None
    """Reasoning of an earlier reply. Only templates that read earlier reasoning use it."""
    prefix: Annotated[bool | None, keywords(default=False)] = None
    """Continue this message. Only for the last message, from the assistant."""

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            missing("content")
        if self.role == "tool" and self.tool_call_id is None:
            missing("tool_call_id")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message as a chat template reads it."""
        content = self.content or ""
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if isinstance(content, str) else "\n".join(part.text or "" for part in content),
        }
        if self.name is not None:
            plain["name"] = self.name
        if self.role == "assistant" and self.reasoning_content:
            plain["reasoning_content"] = self.reasoning_content
        if self.role == "assistant" and self.tool_calls:
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "tool":
            plain["tool_call_id"] = self.tool_call_id
        return plain


def check_messages(messages: list[Message], _: Any) -> None:
    if not messages:
        raise invalid("messages", "must have at least one message")
    last = len(messages) - 1
    for at, message in enumerate(messages):
        field = f"messages[{at}]"
        if message.role not in _ROLES:
            raise invalid(f"{field}.role", f"must be one of {', '.join(_ROLES)}, but it is {quote(message.role)}")
        if message.prefix and (at != last or message.role != "assistant"):
            raise invalid(f"{field}.prefix", "is only possible on the last message, if it is the assistant's")
        if isinstance(message.content, list):
            for number, part in enumerate(message.content):
                if part.type != "text":
                    rule = f"must be text: only text is possible, not {quote(part.type)}"
                    raise invalid(f"{field}.content[{number}].type", rule)
        if message.tool_calls:
            check_tool_calls(f"{field}.tool_calls", message.tool_calls)
    if calls := [call for message in messages for call in message.tool_calls or ()]:
        check_arguments(calls)
