"""The parameters of a chat request in the playground, from the declarations of the request's fields."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from serve_app.api.chat_openapi import body_schemas
from serve_app.api.chat_request import ChatRequest
from serve_app.contracts.generation import REASONING_EFFORTS

#: Names of the fields in each group, with their labels. The first group is always open.
GROUPS: Final = {
    "Main": {"temperature": "Temperature", "top_p": "Top P", "max_tokens": "Max tokens"},
    "Sampling": {
        "top_k": "Top K",
        "min_p": "Min P",
        "seed": "Seed",
        "frequency_penalty": "Frequency penalty",
        "presence_penalty": "Presence penalty",
        "repetition_penalty": "Repetition penalty",
        "logit_bias": "Logit bias (JSON)",
    },
    "Length": {
        "min_tokens": "Min tokens",
        "stop": "Stop sequences, one per line",
        "stop_token_ids": "Stop token IDs, one per line",
        "include_stop_str_in_output": "Include the stop string in the reply",
        "ignore_eos": "Ignore end token",
    },
    "Reasoning": {
        "reasoning_effort": "Reasoning effort",
        "chat_template_kwargs": "Chat template variables (JSON)",
    },
}
#: Fields that other parts of the page set: the conversation, the format of the reply, tools and token probabilities.
ELSEWHERE: Final = frozenset(
    {"model", "messages", "stream", "stream_options", "response_format", "guided_regex", "guided_choice", "tools"}
    | {"tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs"}
)
#: Fields that duplicate others, that only continue a reply, or that return several replies.
LEFT_OUT: Final = frozenset(
    {"max_completion_tokens", "guided_json", "structured_outputs", "continue_final_message", "add_generation_prompt"}
    | {"n"}
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of the side panel. `kind` says how the script reads its value."""

    name: str
    label: str
    kind: str  # number, integer, boolean, lines, integers, object or choice
    hint: str
    low: float | None = None
    high: float | None = None
    default: str = ""
    options: tuple[str, ...] = ()


@cache
def panel() -> dict[str, list[Parameter]]:
    """Returns the parameters by group."""
    fields = body_schemas(ChatRequest, "Body", ())["Body"]["properties"]
    return {
        group: [_parameter(name, label, fields[name]) for name, label in names.items()]
        for group, names in GROUPS.items()
    }


def _parameter(name: str, label: str, schema: dict[str, Any]) -> Parameter:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if name == "seed":
        low = high = None  # JavaScript can't represent such large integers exactly
    if name == "max_tokens" or (name == "min_tokens" and not high):
        high = None
    default = schema.get("default", "")
    return Parameter(
        name,
        label,
        _kind(name, schema),
        _sentence(schema.get("description", "").removeprefix("Extension: ")),
        low,
        high,
        "" if isinstance(default, bool) else f"{default:g}" if isinstance(default, float) else str(default),
        REASONING_EFFORTS if name == "reasoning_effort" else (),
    )


def _kind(name: str, schema: dict[str, Any]) -> str:
    special = {"stop": "lines", "stop_token_ids": "integers", "reasoning_effort": "choice"}
    if name in special:
        return special[name]
    types = schema.get("type", "")
    types = [types] if isinstance(types, str) else types
    return next(one for one in ("boolean", "integer", "number", "object") if one in types)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
