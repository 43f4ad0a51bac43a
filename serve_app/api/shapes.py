"""The JSON types of a chat request: which fields there are and what each is made of. What fails here answers 400.

Only types, never values: a body is checked for all of its types before the first value (422) is looked at. Unknown
fields are ignored and null is the same as absent, because common clients send both. Types are strict: true is no
number, and 1.0 is no integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NoReturn

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from serve_app.api import errors
from serve_app.api.codec import describe, quote

# The branch of a choice of types that was taken; pydantic puts it into an error's path, where no client expects it.
_BRANCHES: Final = ("<string>", "<array>", "<object>")

_GREATEST: Final = 10**300

_EXPECTED: Final = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "string_or_parts": "a string or an array of text parts",
    "string_or_array": "a string or an array of strings",
    "string_or_object": "a string or an object",
}


def _branch(value: Any) -> str | None:
    if isinstance(value, str):
        return "<string>"
    if isinstance(value, list):
        return "<array>"
    return "<object>" if isinstance(value, dict) else None


def _either(error: str) -> Discriminator:
    return Discriminator(_branch, custom_error_type=error, custom_error_message=error)


def _missing(field: str) -> NoReturn:
    raise PydanticCustomError("missing_field", "missing", {"field": field})


class _FirstFault(FailFast):
    """Stops at a list's first bad item: a body of a million of them must not cost a million error reports."""

    __hash__ = object.__hash__  # pydantic's own cannot be a member of a union


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


def _bounded(value: Any) -> Any:
    """An integer that no float can hold is a number all the same: its value is at fault, and not its type."""
    if isinstance(value, int) and abs(value) > _GREATEST:
        return float("inf") if value > 0 else float("-inf")
    return value


_Number = Annotated[float, BeforeValidator(_bounded)]


class TextPart(_Shape):
    """One part of a message's content."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextPart:
        if self.type == "text" and self.text is None:
            _missing("text")
        return self


class CalledFunction(_Shape):
    """What a tool call calls; the arguments are JSON in a string."""

    name: str
    arguments: str


class ToolCall(_Shape):
    """A call that the assistant made."""

    id: str
    type: str = "function"
    function: CalledFunction


class Message(_Shape):
    """One message; which fields it needs depends on its role."""

    role: str
    content: (
        Annotated[
            Annotated[str, Tag("<string>")] | Annotated[list[TextPart], _FirstFault(), Tag("<array>")],
            _either("string_or_parts"),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], _FirstFault()] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            _missing("content")
        if self.role == "tool" and self.tool_call_id is None:
            _missing("tool_call_id")
        return self


class StreamOptions(_Shape):
    """Options of a streamed reply."""

    include_usage: bool | None = None


class ResponseFormat(_Shape):
    """The form of the reply."""

    type: str
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema":
            if self.json_schema is None:
                _missing("json_schema")
            for field, kind, error, required in (
                ("name", str, "string_type", True),
                ("schema", dict, "dict_type", True),
                ("strict", bool, "bool_type", False),
            ):
                value = self.json_schema.get(field)
                if value is None and required:
                    _missing(f"json_schema.{field}")
                if value is not None and not isinstance(value, kind):
                    raise PydanticCustomError(error, "type", {"field": f"json_schema.{field}", "input": value})
        return self


class Function(_Shape):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Shape):
    """A tool that the model may use."""

    type: str
    function: Function | None = None

    @model_validator(mode="after")
    def _complete(self) -> Tool:
        if self.type == "function" and self.function is None:
            _missing("function")
        return self


class FunctionName(_Shape):
    """The function that a tool choice names."""

    name: str


class NamedTool(_Shape):
    """A tool choice that names a function."""

    type: str
    function: FunctionName


class Body(_Shape):
    """The body of POST /chat/completions."""

    model: str
    messages: Annotated[list[Message], _FirstFault()]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: _Number | None = None
    top_p: _Number | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: (
        Annotated[
            Annotated[str, Tag("<string>")] | Annotated[list[str], _FirstFault(), Tag("<array>")],
            _either("string_or_array"),
        ]
        | None
    ) = None
    seed: int | None = None
    frequency_penalty: _Number | None = None
    presence_penalty: _Number | None = None
    logit_bias: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], _FirstFault()] | None = None
    tool_choice: (
        Annotated[Annotated[str, Tag("<string>")] | Annotated[NamedTool, Tag("<object>")], _either("string_or_object")]
        | None
    ) = None
    parallel_tool_calls: Any = None  # a wish that only false changes: nothing else that clients put here is refused
    top_k: int | None = None
    min_p: _Number | None = None
    repetition_penalty: _Number | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None

    @field_validator("logit_bias")
    @classmethod
    def _numbers(cls, bias: dict[str, Any] | None) -> dict[str, Any] | None:
        # By hand, to stop at the first fault as lists do.
        for token, value in (bias or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PydanticCustomError("float_type", "type", {"field": token, "input": value})
        return bias


def read(parsed: Mapping[str, Any]) -> Body:
    """The typed body. Raises InvalidFormatError for the first field that is missing or of the wrong type."""
    try:
        return Body.model_validate(parsed)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False)[0]) from None


def _as_api_error(error: ErrorDetails) -> errors.InvalidFormatError:
    context = error.get("ctx", {})
    path = [step for step in error["loc"] if step not in _BRANCHES]
    field = _dotted([*path, context["field"]] if "field" in context else path)
    found = context.get("input", error["input"])
    kind = error["type"]
    if kind in ("missing", "missing_field") or found is None:
        return errors.invalid_format(f"{field} is missing (null counts as missing): it is required here.", field)
    expected = _EXPECTED.get(kind, "another type")
    return errors.invalid_format(f"{field} must be {expected}, but it is {describe(found)}.", field)


def _dotted(path: list[Any]) -> str:
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            step = step if len(step) <= 60 and step.isprintable() else quote(step)
            text += f".{step}" if text else step
    return text
