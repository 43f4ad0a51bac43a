"""Types and rules for functions and reply formats in a chat request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from serve_app.api import errors
from serve_app.api.codec import MAX_ITEMS, FirstFault, Shape, have_more_items, keywords, missing, quote, wrong_type
from serve_app.api.json_schemas import MAX_BYTES_OF_TOOLS, check_schema
from serve_app.contracts.generation import ToolChoice

TOOL_CHOICES: Final[Mapping[str, ToolChoice]] = {"none": "none", "auto": "auto", "required": "required"}
MAX_TOOLS: Final = 128
_NAME: Final = "[A-Za-z0-9_-]{1,64}"
NAMED: Final[dict[str, Any]] = {"pattern": f"^{_NAME}$"}
_MODES: Final = ["auto", "required"]
_CHOICES: Final = ["function", "allowed_tools"]
_FORMATS: Final = ["text", "json_object", "json_schema"]
_FunctionType = Annotated[str, keywords(const="function")]


class CalledFunction(Shape):
    """The function of a tool call. The arguments are JSON in a string."""

    name: str
    arguments: str
    """JSON in a string."""


class OfFunction(Shape):
    """An object whose `type` must be function. With another type, the error names `type`, not a missing `function`."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("function") is None and given.get("type", "function") != "function":
            return given | {"function": {"name": "", "arguments": ""}}
        return given


class ToolCall(OfFunction):
    """A call that the assistant made."""

    id: str
    """Id of the call. It is the `tool_call_id` of the message with the result."""
    type: _FunctionType = "function"
    function: CalledFunction


class ResponseFormat(Shape):
    """The form of the reply."""

    type: Annotated[str, keywords(enum=_FORMATS)]
    """`json_object`: the reply is a JSON object. `json_schema`: the reply validates against `json_schema`. Only a
    reply that is cut short can be incomplete."""
    json_schema: Annotated[
        dict[str, Any] | None,
        keywords(
            properties={
                "name": {"type": "string", "description": "For you; the model does not see it.", **NAMED},
                "schema": {"type": "object", "description": "A JSON Schema."},
                "strict": {"type": ["boolean", "null"], "default": False},
            },
            required=["name", "schema"],
        ),
    ] = None
    """For `json_schema`. With `strict`, a keyword of `schema` that cannot be enforced returns 422."""

    sent_schema: dict[str, Any] | None = Field(None, alias="schema")
    """For `json_object`: same as `json_schema` with `strict`."""

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema":
            if self.json_schema is None:
                missing("json_schema")
            for field, kind, error, required in (
                ("name", str, "string_type", True),
                ("schema", dict, "dict_type", True),
                ("strict", bool, "bool_type", False),
            ):
                value = self.json_schema.get(field)
                if value is None and required:
                    missing(f"json_schema.{field}")
                if value is not None and not isinstance(value, kind):
                    wrong_type(error, f"json_schema.{field}", value)
        return self

    def plain(self) -> dict[str, Any] | None:
        """Returns the format with only the members that its type uses. None means text."""
        if self.type == "text":
            return None
        if self.type == "json_object" and self.sent_schema is not None:
            return {
                "type": "json_schema",
                "json_schema": {"name": "schema", "schema": self.sent_schema, "strict": True},
            }
        return {"type": self.type} | ({"json_schema": self.json_schema} if self.type == "json_schema" else {})


class Function(Shape):
    """A function that the model may call."""

    name: Annotated[str, keywords(**NAMED)]
    description: str | None = None
    """What the function does and when to call it, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, of type object."""
    strict: Annotated[bool | None, keywords(default=False)] = None
    """Enforce `parameters` for the arguments."""


class Tool(OfFunction):
    """A tool that the model may use."""

    type: _FunctionType
    function: Function


class FunctionName(Shape):
    """The function that a tool choice names."""

    name: str
    """One of `tools`."""


class AllowedTool(OfFunction):
    """A function that a tool choice allows."""

    type: _FunctionType
    function: FunctionName


class AllowedTools(Shape):
    """The functions that the reply may call."""

    mode: Annotated[str, keywords(enum=_MODES)]
    """`auto`: the model decides. `required`: at least one call."""
    tools: Annotated[list[AllowedTool], FirstFault(), keywords(minItems=1, maxItems=MAX_TOOLS)]
    """Some of the request's `tools`."""


class ChosenTools(Shape):
    """A tool choice that names a function, or several functions that are allowed."""

    type: Annotated[str, keywords(enum=_CHOICES)]
    function: FunctionName | None = None
    """For the type `function`."""
    allowed_tools: AllowedTools | None = None
    """For the type `allowed_tools`."""

    @model_validator(mode="after")
    def _complete(self) -> ChosenTools:
        if self.type in _CHOICES and getattr(self, self.type) is None:
            missing(self.type)
        return self

    @property
    def mode(self) -> ToolChoice:
        return (
            "required"
            if self.type == "function" or self.allowed_tools is None
            else TOOL_CHOICES[self.allowed_tools.mode]
        )

    @property
    def allowed(self) -> tuple[str, ...]:
        """Names of the allowed functions; empty if the choice names one function."""
        if self.type == "function" or self.allowed_tools is None:
            return ()
        return tuple(dict.fromkeys(tool.function.name for tool in self.allowed_tools.tools))


def invalid(field: str, rule: str) -> errors.ApiError:
    """Returns an error with status 422 for a value that violates a rule."""
    return errors.invalid_parameters(f"{field} {rule}.", field)


def check_tool_calls(field: str, calls: Sequence[ToolCall]) -> None:
    """Checks the types of tool calls. Raises ApiError (422)."""
    for at, call in enumerate(calls):
        _check_type(f"{field}[{at}].type", call.type)


def check_arguments(calls: Sequence[ToolCall]) -> None:
    """Raises ApiError (422) if the arguments of a conversation's calls have too many values.

    The arguments are JSON in strings. The model's replica parses them, because templates read them as objects.
    """
    if have_more_items([call.function.arguments.encode() for call in calls], MAX_ITEMS):
        raise invalid("messages", f"have tool calls whose arguments have more than {MAX_ITEMS} values")


def check_response_format(given: ResponseFormat) -> None:
    """Checks the values of a response format. Raises ApiError (422)."""
    if given.type not in _FORMATS:
        rule = f"must be text, json_object or json_schema, but it is {quote(given.type)}"
        raise invalid("response_format.type", rule)
    if given.type == "json_schema" and given.json_schema is not None:
        check_name("response_format.json_schema.name", given.json_schema["name"])
        check_schema("response_format.json_schema.schema", given.json_schema["schema"])
    if given.sent_schema is not None:
        if given.type != "json_object":
            where = "is only possible with json_object. Send it as response_format.json_schema.schema"
            raise invalid("response_format.schema", where)
        check_schema("response_format.schema", given.sent_schema)


def check_tools(tools: Sequence[Tool]) -> None:
    """Checks the values of tools. Raises ApiError (422)."""
    names: set[str] = set()
    for at, tool in enumerate(tools):
        _check_type(f"tools[{at}].type", tool.type)
        name = tool.function.name
        check_name(f"tools[{at}].function.name", name)
        if name in names:
            raise invalid(f"tools[{at}].function.name", f"must not repeat, but {name} is there twice")
        names.add(name)
    total = sum(
        check_schema(f"tools[{at}].function.parameters", tool.function.parameters)
        for at, tool in enumerate(tools)
        if tool.function.parameters is not None
    )
    if total > MAX_BYTES_OF_TOOLS:
        sizes = f"{total} bytes of parameters: send at most {MAX_BYTES_OF_TOOLS} bytes for all tools together"
        raise invalid("tools", f"have {sizes}")


def check_tool_choice(choice: str | ChosenTools, tools: Sequence[Tool]) -> None:
    """Checks a tool choice against the tools. Raises ApiError (422)."""
    if isinstance(choice, ChosenTools):
        _check_chosen(choice, {tool.function.name for tool in tools})
    elif choice not in TOOL_CHOICES:
        raise invalid("tool_choice", f"must be none, auto, required or a function, but it is {quote(choice)}")
    elif choice == "required" and not tools:
        raise invalid("tool_choice", "must not be 'required' without tools")


def _check_chosen(choice: ChosenTools, names: Set[str]) -> None:
    named = {"tool_choice.function": choice.function} if choice.type == "function" else {}
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        if allowed.mode not in _MODES:
            raise invalid(
                "tool_choice.allowed_tools.mode", f"must be auto or required, but it is {quote(allowed.mode)}"
            )
        if not 1 <= len(allowed.tools) <= MAX_TOOLS:
            rule = f"must have 1 to {MAX_TOOLS} tools, but it has {len(allowed.tools)}"
            raise invalid("tool_choice.allowed_tools.tools", rule)
        for at, tool in enumerate(allowed.tools):
            _check_type(f"tool_choice.allowed_tools.tools[{at}].type", tool.type)
            named[f"tool_choice.allowed_tools.tools[{at}].function"] = tool.function
    elif choice.type != "function":
        rule = f"must be function or allowed_tools, but it is {quote(choice.type)}. Send other choices as a string"
        raise invalid("tool_choice.type", rule)
    for field, function in named.items():
        if function is not None and function.name not in names:
            raise invalid(f"{field}.name", f"must name one of the tools, but it is {quote(function.name)}")


def _check_type(field: str, kind: str) -> None:
    if kind != "function":
        raise invalid(field, f"must be function, but it is {quote(kind)}")


def check_name(field: str, name: str) -> None:
    if not re.fullmatch(_NAME, name):
        raise invalid(field, f"must be 1 to 64 of A-Z, a-z, 0-9, _ and -, but it is {quote(name)}")
