"""Declares each field of a request to POST /responses once, and checks a body against the declarations.

`responses_chat` translates a checked request to the chat format, whose limits and rules apply to every door.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from serve_app.api import errors
from serve_app.api.chat_request import Number, ServedModels
from serve_app.api.codec import FirstFault, Shape, either, keywords, missing, quote, typed, wrong_type
from serve_app.api.field_checks import Check, Range
from serve_app.api.served_names import served_identifier
from serve_app.api.tools_and_formats import MAX_TOOLS, NAMED, invalid

MAX_METADATA: Final = 16
_MAX_METADATA_KEY: Final = 64
_MAX_METADATA_VALUE: Final = 512
_TOKENS_OF_AN_ITEM: Final = 1  # minimum, because several items may become one message

ROLES: Final = ("user", "assistant", "system", "developer")
TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal")
INCLUDED: Final = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
LOGPROBS: Final = INCLUDED[0]
_FORMATS: Final = ["text", "json_object", "json_schema"]
_CHOICES: Final = ["none", "auto", "required"]
_CHOICE_TYPES: Final = ["function", "custom", "allowed_tools"]
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_TRUNCATIONS: Final = ["auto", "disabled"]

MAX_LABEL: Final = 512  # maximum characters of a text that the response only repeats
REFUSED: Final[Mapping[str, str]] = {
    "conversation": "is not supported. Send the items in input, or previous_response_id",
    "prompt": "is not supported: there are no stored prompt templates. Send instructions and input",
    "context_management": "is not supported. Send a shorter input",
    "moderation": "is not supported. Leave it out",
}
"""Fields of the format that would change the reply, and what to send instead."""

_Text = Annotated[str, Tag("<string>")]


class ContentPart(Shape):
    """One part of a message or of a call's output."""

    type: Annotated[str, keywords(enum=list(TEXT_PARTS))]
    text: str | None = None
    """Text of the part. Parts are joined by line feeds."""
    refusal: str | None = None
    """For `refusal`: the text of the refusal."""

    @model_validator(mode="after")
    def _complete(self) -> ContentPart:
        if self.type == "refusal" and self.refusal is None:
            missing("refusal")
        if self.type in TEXT_PARTS and self.type != "refusal" and self.text is None:
            missing("text")
        return self

    def plain(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


_Content = Annotated[_Text | Annotated[list[ContentPart], FirstFault(), Tag("<array>")], either("string_or_parts")]


class InputMessage(Shape):
    """A message of the conversation. `type` may be left out."""

    type: Annotated[str | None, keywords(enum=["message", None])] = None
    role: Annotated[str, keywords(enum=list(ROLES))]
    """`developer` counts as `system`."""
    content: _Content
    """Text of the message."""


class FunctionCallItem(Shape):
    """A call that the model made."""

    type: Annotated[str, keywords(const="function_call")]
    call_id: str
    """Id of the call. The item with its output has the same `call_id`."""
    name: str
    """Name of the function."""
    arguments: str
    """JSON in a string."""
    namespace: str | None = None
    """The namespace of the function, if its tool has one."""


class FunctionCallOutputItem(Shape):
    """The output of a function call."""

    type: Annotated[str, keywords(const="function_call_output")]
    call_id: str
    """The `call_id` of the call."""
    output: _Content
    """Text of the output."""


class CustomToolCallItem(Shape):
    """A call of a custom tool that the model made."""

    type: Annotated[str, keywords(const="custom_tool_call")]
    call_id: str
    """Id of the call. The item with its output has the same `call_id`."""
    name: str
    """Name of the tool."""
    input: str
    """Text that the model wrote for the tool."""
    namespace: str | None = None
    """The namespace of the tool, if it has one."""


class CustomToolCallOutputItem(Shape):
    """The output of a call of a custom tool."""

    type: Annotated[str, keywords(const="custom_tool_call_output")]
    call_id: str
    """The `call_id` of the call."""
    output: _Content
    """Text of the output."""


class ReasoningPart(Shape):
    """A piece of reasoning."""

    text: str
    """The text."""


class ReasoningItem(Shape):
    """Reasoning of an earlier reply. `encrypted_content` is ignored."""

    type: Annotated[str, keywords(const="reasoning")]
    summary: Annotated[list[ReasoningPart], FirstFault()] | None = None
    """Used if there is no `content`."""
    content: Annotated[list[ReasoningPart], FirstFault()] | None = None
    """The reasoning. Templates that read earlier reasoning get it."""

    def plain(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


class ItemReference(Shape):
    """An item of a stored response."""

    type: Annotated[str | None, keywords(enum=["item_reference"])] = None
    id: str
    """Id of the item."""


class OtherItem(Shape):
    """An item of an unsupported type."""

    type: str


def _item(value: Any) -> str | None:
    """Returns the tag of an item."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        return "<reference>" if "id" in value and "role" not in value and "content" not in value else "<message>"
    return ITEM_TAGS.get(kind, "<other>") if isinstance(kind, str) else "<other>"


ITEM_TAGS: Final = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<output>",
    "custom_tool_call": "<custom call>",
    "custom_tool_call_output": "<custom output>",
    "reasoning": "<reasoning>",
    "item_reference": "<reference>",
}
_AN_ITEM: Final = Discriminator(_item, custom_error_type="an_object", custom_error_message="type")
Item = (
    InputMessage
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | ReasoningItem
    | ItemReference
    | OtherItem
)
AnyItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<call>")]
    | Annotated[FunctionCallOutputItem, Tag("<output>")]
    | Annotated[CustomToolCallItem, Tag("<custom call>")]
    | Annotated[CustomToolCallOutputItem, Tag("<custom output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<reference>")]
    | Annotated[OtherItem, Tag("<other>")],
    _AN_ITEM,
]


class FunctionTool(Shape):
    """A function that the model may call."""

    type: Annotated[str, keywords(const="function")]
    name: Annotated[str, keywords(**NAMED)]
    """1 to 64 letters, digits, `_` and `-`."""
    description: str | None = None
    """What the function does and when to call it, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, of type object."""
    strict: Annotated[bool | None, keywords(default=False)] = None
    """Enforce `parameters` for the arguments."""


class CustomTool(Shape):
    """A tool that takes any text as input. The model sees it as a function with one string."""

    type: Annotated[str, keywords(const="custom")]
    name: Annotated[str, keywords(**NAMED)]
    """1 to 64 letters, digits, `_` and `-`."""
    description: str | None = None
    """Tells the model what the tool does and when to call it."""
    format: dict[str, Any] | None = None
    """Format of the input. A grammar is shown to the model and not enforced."""


class OtherTool(Shape):
    """A tool that runs elsewhere, such as `web_search`. It is left out; the reply's `omitted_tools` names it."""

    type: Annotated[str, keywords(**{"not": {"enum": ["function", "custom", "namespace"]}})]


def _tool(value: Any) -> str | None:
    """Returns the tag of a tool."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    return TOOL_TAGS.get(kind, "<other>") if isinstance(kind, str) else "<other>"


def _inner_tool(value: Any) -> str | None:
    """Returns the tag of a tool in a namespace."""
    tag = _tool(value)
    return "<other>" if tag == "<namespace>" else tag


TOOL_TAGS: Final = {"function": "<function>", "custom": "<custom>", "namespace": "<namespace>"}
_A_TOOL: Final = Discriminator(_tool, custom_error_type="an_object", custom_error_message="type")
_InnerTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_inner_tool, custom_error_type="an_object", custom_error_message="type"),
]


class NamespaceTool(Shape):
    """Tools under a common name. The model sees each as a function `namespace__name`."""

    type: Annotated[str, keywords(const="namespace")]
    name: str
    """Name of the namespace."""
    description: str | None = None
    """What the tools have in common, for the model."""
    tools: Annotated[list[_InnerTool], FirstFault()]
    """Functions and custom tools."""


Tool = FunctionTool | CustomTool | NamespaceTool | OtherTool
_Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[OtherTool, Tag("<other>")],
    _A_TOOL,
]


class AllowedTool(Shape):
    """A tool that a tool choice names."""

    type: str
    name: str | None = None
    """Name of the function or custom tool."""
    namespace: str | None = None
    """The namespace of the tool, if it has one."""


class ToolChoice(Shape):
    """A tool choice that names tools."""

    type: Annotated[str, keywords(enum=_CHOICE_TYPES)]
    name: str | None = None
    """For `function` and `custom`: one of `tools`."""
    namespace: str | None = None
    """The namespace of the tool, if it has one."""
    mode: Annotated[str | None, keywords(enum=["auto", "required", None])] = None
    """For `allowed_tools`: whether a call is required."""
    tools: Annotated[list[AllowedTool], FirstFault()] | None = None
    """For `allowed_tools`: the tools that the model may call."""

    @model_validator(mode="after")
    def _complete(self) -> ToolChoice:
        if self.type in ("function", "custom") and self.name is None:
            missing("name")
        if self.type == "allowed_tools":
            if self.mode is None:
                missing("mode")
            if self.tools is None:
                missing("tools")
        return self


class TextFormat(Shape):
    """The form of the reply's text."""

    type: Annotated[str, keywords(enum=_FORMATS)]
    """`json_object`: the text is a JSON object. `json_schema`: the text validates against `schema`."""
    name: Annotated[str | None, keywords(**NAMED)] = None
    """For `json_schema`: a name for you; the model does not see it."""
    description: str | None = None
    """For you; the model does not see it."""
    sent_schema: dict[str, Any] | None = Field(None, alias="schema")
    """For `json_schema`: a JSON Schema."""
    strict: Annotated[bool | None, keywords(default=False)] = None
    """For `json_schema`: if true, a keyword of `schema` that cannot be enforced returns 422."""

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if self.type == "json_schema":
            if self.name is None:
                missing("name")
            if self.sent_schema is None:
                missing("schema")
        return self


class TextOptions(Shape):
    """Options of the reply's text."""

    format: TextFormat | None = None
    """Form of the text. Default: text."""
    verbosity: Annotated[str | None, keywords(maxLength=MAX_LABEL)] = None
    """Ignored."""


class ReasoningOptions(Shape):
    """Options of the model's reasoning."""

    effort: Annotated[str | None, keywords(enum=[*EFFORTS, None])] = None
    """How much the model reasons, if its template has a variable for it. Ignored otherwise."""
    summary: Annotated[str | None, keywords(maxLength=MAX_LABEL)] = None
    """Accepted. There are no summaries: reasoning is in the item's `content`."""


class ResponsesStreamOptions(Shape):
    """Options of a streamed reply."""

    include_obfuscation: bool | None = None
    """Ignored."""
    resume: Annotated[bool | None, keywords(default=False)] = None
    """Extension: if a replica fails, another one continues the reply. Not with log probabilities."""


def _check_input(given: str | list[Item], request: ResponsesRequest) -> None:
    if isinstance(given, str):
        return
    if not given and request.previous_response_id is None and not request.instructions:
        raise invalid("input", "must have at least one item")
    for at, item in enumerate(given):
        field = f"input[{at}]"
        if isinstance(item, OtherItem):
            served = ", ".join(ITEM_TAGS)
            raise invalid(f"{field}.type", f"must be one of {served}, but it is {quote(item.type)}. Remove this item")
        if isinstance(item, InputMessage):
            if item.role not in ROLES:
                raise invalid(f"{field}.role", f"must be one of {', '.join(ROLES)}, but it is {quote(item.role)}")
            _check_parts(f"{field}.content", item.content)
        elif isinstance(item, FunctionCallOutputItem | CustomToolCallOutputItem):
            _check_parts(f"{field}.output", item.output)


def _check_parts(field: str, content: str | list[ContentPart]) -> None:
    if isinstance(content, str):
        return
    for at, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            rule = f"must be one of {', '.join(TEXT_PARTS)}: only text is possible, not {quote(part.type)}"
            raise invalid(f"{field}[{at}].type", rule)


def _check_include(included: list[str], _: ResponsesRequest) -> None:
    for at, name in enumerate(included):
        if name not in INCLUDED:
            raise invalid(f"include[{at}]", f"must be one of {', '.join(INCLUDED)}, but it is {quote(name)}")


def _check_metadata(metadata: dict[str, Any], _: ResponsesRequest) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"must have at most {MAX_METADATA} pairs, but it has {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY:
            raise invalid("metadata", f"must have names of at most {_MAX_METADATA_KEY} characters, not {quote(key)}")
        if len(value) > _MAX_METADATA_VALUE:
            name = f"metadata.{key if key.isprintable() else quote(key)}"
            raise invalid(name, f"must have at most {_MAX_METADATA_VALUE} characters, but it has {len(value)}")


def _check_max_output_tokens(value: int, _: ResponsesRequest) -> None:
    if value < 1:
        raise invalid("max_output_tokens", f"must be at least 1, but it is {value}")


def _check_length(field: str, text: str | None) -> None:
    if text is not None and len(text) > MAX_LABEL:
        raise invalid(field, f"must have at most {MAX_LABEL} characters, but it has {len(text)}")


def _label(field: str) -> Check:
    return Check(lambda text, _: _check_length(field, text))


_LABEL: Final[dict[str, Any]] = {"maxLength": MAX_LABEL}


def _check_reasoning(options: ReasoningOptions, _: ResponsesRequest) -> None:
    _check_length("reasoning.summary", options.summary)
    if options.effort is not None and options.effort not in EFFORTS:
        raise invalid("reasoning.effort", f"must be one of {', '.join(EFFORTS)}, but it is {quote(options.effort)}")


def _check_text(text: TextOptions, _: ResponsesRequest) -> None:
    _check_length("text.verbosity", text.verbosity)
    if text.format is not None and text.format.type not in _FORMATS:
        rule = f"must be text, json_object or json_schema, but it is {quote(text.format.type)}"
        raise invalid("text.format.type", rule)


def _check_tool_choice(choice: str | ToolChoice, _: ResponsesRequest) -> None:
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise invalid("tool_choice", f"must be none, auto, required or an object, but it is {quote(choice)}")
    elif choice.type not in _CHOICE_TYPES:
        rule = f"must be function, custom or allowed_tools: the tool {quote(choice.type)} is not supported"
        raise invalid("tool_choice.type", rule)
    elif choice.type == "allowed_tools" and choice.mode not in ("auto", "required"):
        raise invalid("tool_choice.mode", f"must be auto or required, but it is {quote(choice.mode or '')}")


def _check_truncation(value: str, _: ResponsesRequest) -> None:
    if value not in _TRUNCATIONS:
        raise invalid("truncation", f"must be auto or disabled, but it is {quote(value)}")


def _check_resume(options: ResponsesStreamOptions, request: ResponsesRequest) -> None:
    if options.resume and not request.stream:
        raise invalid("stream_options.resume", "is only possible with stream: true")
    if options.resume and request.wants_logprobs:
        raise invalid("stream_options.resume", "is not possible with logprobs: leave one of the two out")


def _check_background(value: bool, request: ResponsesRequest) -> None:
    if value and request.stream:
        raise invalid("background", "is not possible together with stream: true")
    if value and not request.store:
        raise invalid("background", "needs store: true, because the response is read later")


def _strings(value: Any) -> Any:
    if isinstance(value, dict):
        for name, one in value.items():
            if not isinstance(one, str):
                wrong_type("string_type", name, one)
    return value


class ResponsesRequest(Shape):
    """The body of POST /responses. The string below a field is its description in the OpenAPI document."""

    model: str
    """A model identifier from `/models`."""
    input: Annotated[
        Annotated[
            _Text | Annotated[list[AnyItem], FirstFault(), Tag("<array>")],
            either("string_or_items"),
        ],
        Check(_check_input),
    ]
    """What the user says, or the items of the conversation."""
    instructions: str | None = None
    """System message at the beginning. With `previous_response_id`, earlier instructions do not carry over."""
    stream: bool = False
    """Stream the reply as server-sent events."""
    stream_options: Annotated[ResponsesStreamOptions | None, Check(_check_resume)] = None
    """Options for streaming."""
    max_output_tokens: Annotated[int | None, Check(_check_max_output_tokens), keywords(minimum=1)] = None
    """Maximum number of tokens of the reply and its reasoning. Values above the model's limit count as the limit."""
    temperature: Annotated[Number, Range(0, 2)] = 1.0
    """Sampling temperature. 0 always picks the most likely token. `/models` lists recommended values."""
    top_p: Annotated[Number, Range(0, 1, above=True)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    top_logprobs: Annotated[int, Range(0, 20)] = 0
    """Number of most likely tokens to return at each position of the text. Above 0, the text has `logprobs`."""
    include: Annotated[list[Annotated[str, keywords(enum=list(INCLUDED))]], FirstFault(), Check(_check_include)] = []  # noqa: RUF012 (pydantic copies it)
    """`message.output_text.logprobs` returns log probabilities. The others are accepted and add nothing."""
    text: Annotated[TextOptions | None, Check(_check_text)] = None
    """Form of the reply's text."""
    tools: Annotated[list[_Tool], FirstFault(), keywords(maxItems=MAX_TOOLS)] = []  # noqa: RUF012
    """Tools that the model may call. Tools of other types are left out; `omitted_tools` of the reply names them."""
    tool_choice: Annotated[
        Annotated[
            Annotated[_Text, keywords(enum=_CHOICES)] | Annotated[ToolChoice, Tag("<object>")],
            either("string_or_object"),
        ]
        | None,
        Check(_check_tool_choice),
    ] = None
    """`none`: no call. `auto`: the model decides. `required`: at least one call. An object: a call of this tool, or
    calls of these tools only."""
    parallel_tool_calls: bool = True
    """Set to false to allow at most one call per reply. Enforced if `tool_choice` requires a call; with `auto`, only if
    a function has `strict` or the text has an enforced format."""
    reasoning: Annotated[ReasoningOptions | None, Check(_check_reasoning)] = None
    """Options of the model's reasoning."""
    previous_response_id: str | None = None
    """Id of a stored response. Its input and output come before `input`."""
    store: bool = True
    """Store the response, so that it can be read and continued."""
    background: Annotated[bool, Check(_check_background)] = False
    """Return at once and generate the response in the background. Read it by its id. Not possible with `stream` or
    without `store`."""
    metadata: Annotated[
        dict[str, Any],
        BeforeValidator(_strings),
        Check(_check_metadata),
        keywords(
            maxProperties=MAX_METADATA,
            propertyNames={"maxLength": _MAX_METADATA_KEY},
            additionalProperties={"type": "string", "maxLength": _MAX_METADATA_VALUE},
        ),
    ] = {}  # noqa: RUF012
    """Up to 16 pairs of strings. The reply repeats them."""
    truncation: Annotated[str, Check(_check_truncation), keywords(enum=[*_TRUNCATIONS, None])] = "disabled"
    """Accepted. An input that is longer than the context returns 422 in either case."""
    max_tool_calls: int | None = None
    """Ignored: it limits tools that run elsewhere."""
    user: Annotated[str | None, _label("user"), keywords(**_LABEL)] = None
    """Ignored. The reply repeats it."""
    safety_identifier: Annotated[str | None, _label("safety_identifier"), keywords(**_LABEL)] = None
    """Ignored. The reply repeats it."""
    prompt_cache_key: Annotated[str | None, _label("prompt_cache_key"), keywords(**_LABEL)] = None
    """Ignored: the service finds cached prompts itself. The reply repeats it."""
    service_tier: str | None = None
    """Ignored. There is one tier, `default`."""

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0

    @property
    def resume(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.resume)


def check_responses_request(parsed: Mapping[str, Any], served: ServedModels) -> ResponsesRequest:
    """Checks a parsed JSON body. Raises ApiError: 400 for a wrong type, then 422 for a wrong value."""
    _refuse_too_many(parsed, served)
    request = typed(ResponsesRequest, {name: value for name, value in parsed.items() if value is not None})
    served_identifier(request.model, served)
    for name, rule in REFUSED.items():
        if parsed.get(name):
            raise invalid(name, rule)
    for name, marker in _CHECKS:
        if name not in request.model_fields_set:
            continue
        if isinstance(marker, Range):
            marker.check_value(name, getattr(request, name))
        else:
            marker.function(getattr(request, name), request)
    return request


def _refuse_too_many(parsed: Mapping[str, Any], served: ServedModels) -> None:
    """Rejects a request with too many items for the longest context, or with too many tools, before reading them.

    An item has at least `_TOKENS_OF_AN_ITEM` tokens, and each of its parts at least one.
    """
    items, tools = parsed.get("input"), parsed.get("tools")
    longest = max((context for context, _ in served.values()), default=0)
    if isinstance(items, list):
        parts = [item.get(name) for item in items if isinstance(item, dict) for name in ("content", "output")]
        if len(items) * _TOKENS_OF_AN_ITEM + sum(len(part) for part in parts if isinstance(part, list)) > longest:
            raise errors.context_length_exceeded(0, longest)
    if isinstance(tools, list):
        inner = [tool.get("tools") for tool in tools if isinstance(tool, dict)]
        total = len(tools) + sum(len(many) for many in inner if isinstance(many, list))
        if len(tools) > MAX_TOOLS:
            raise invalid("tools", f"must have at most {MAX_TOOLS} entries, but it has {len(tools)}")
        if total > 2 * MAX_TOOLS:
            rule = f"must have at most {2 * MAX_TOOLS} entries, including the tools in namespaces, but it has {total}"
            raise invalid("tools", rule)


def _checks() -> list[tuple[str, Range | Check]]:
    return [
        (name, marker)
        for name, field in ResponsesRequest.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, Range | Check)
    ]


_CHECKS: Final = _checks()
