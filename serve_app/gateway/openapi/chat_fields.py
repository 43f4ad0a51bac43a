"""What the types of a chat request's fields don't say: words, ranges and defaults.

Ranges are checked where requests are (serve_app.api.schema); `tests/gateway/test_openapi_request.py` holds both
together at every end of every range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NAME: Final = "^[A-Za-z0-9_-]{1,64}$"

FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Body.model": {"description": "A served identifier, as `/models` lists them."},
    "Body.messages": {"description": "The conversation so far.", "minItems": 1},
    "Body.stream": {
        "description": "Send the reply as server-sent events, in pieces as they are generated.",
        "default": False,
    },
    "Body.stream_options": {"description": "Only together with `stream: true`."},
    "Body.temperature": {
        "description": "How much chance decides. 0 always takes the most likely token. `/models` has recommendations.",
        "minimum": 0,
        "maximum": 2,
        "default": 1.0,
    },
    "Body.top_p": {
        "description": "Choose only among the most likely tokens that together reach this probability.",
        "exclusiveMinimum": 0,
        "maximum": 1,
        "default": 1.0,
    },
    "Body.max_tokens": {
        "description": "The most tokens of one choice. Without it: what the model gives at most, or what context and "
        "balance leave.",
        "minimum": 1,
    },
    "Body.max_completion_tokens": {
        "description": "Another name of `max_tokens`. If both are given, they must be equal.",
        "minimum": 1,
    },
    "Body.n": {
        "description": "How many choices to generate. The prompt is billed once.",
        "minimum": 1,
        "maximum": 8,
        "default": 1,
    },
    "Body.stop": {
        "description": "Strings that end the reply. They are not part of it, nor is what comes after.",
        "branches": {"string": {"minLength": 1}, "array": {"maxItems": 16, "items": {"minLength": 1}}},
    },
    "Body.seed": {
        "description": "The same seed and request give the same reply.",
        "minimum": -(2**63),
        "maximum": 2**63 - 1,
    },
    "Body.frequency_penalty": {
        "description": "Above 0, tokens become less likely the more often the reply has them already.",
        "minimum": -2,
        "maximum": 2,
        "default": 0.0,
    },
    "Body.presence_penalty": {
        "description": "Above 0, tokens become less likely once the reply has them.",
        "minimum": -2,
        "maximum": 2,
        "default": 0.0,
    },
    "Body.logit_bias": {
        "description": "Token id to what is added to its logit: -100 never, 100 always. Ids must be in the model's "
        "vocabulary.",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "Body.logprobs": {"description": "Tell the log-probabilities of the reply's tokens.", "default": False},
    "Body.top_logprobs": {
        "description": "And those of so many likeliest tokens at each place. Only together with `logprobs: true`.",
        "minimum": 0,
        "maximum": 20,
        "default": 0,
    },
    "Body.response_format": {"description": "The form of the reply; without it, text."},
    "Body.tools": {"description": "Functions that the model may call, each name once.", "maxItems": 128},
    "Body.tool_choice": {
        "description": "`none`: call nothing. `auto`: the model decides. `required`: call at least one of the tools. "
        "An object: call this one. Without it: `auto` if there are tools, else `none`.",
        "branches": {"string": {"enum": ["none", "auto", "required"]}},
    },
    "Body.parallel_tool_calls": {
        "description": "Whether one reply may call several functions: false says no, anything else is ignored.",
        "default": True,
    },
    "Body.top_k": {
        "description": "Extension: choose only among so many most likely tokens. 0 and -1 are off.",
        "minimum": -1,
        "maximum": 1_000_000,
        "default": 0,
    },
    "Body.min_p": {
        "description": "Extension: choose only among tokens that have at least this share of the likeliest one's "
        "probability.",
        "minimum": 0,
        "maximum": 1,
        "default": 0.0,
    },
    "Body.repetition_penalty": {
        "description": "Extension: above 1, tokens of prompt and reply become less likely to come again.",
        "exclusiveMinimum": 0,
        "maximum": 10,
        "default": 1.0,
    },
    "Body.min_tokens": {
        "description": "Extension: the reply does not end before so many tokens. At most `max_tokens`.",
        "minimum": 0,
        "default": 0,
    },
    "Body.ignore_eos": {
        "description": "Extension: go on after the model has ended its reply, until `max_tokens`.",
        "default": False,
    },
    "StreamOptions.include_usage": {
        "description": "End the stream with a chunk that has the usage.",
        "default": False,
    },
    "Message.content": {
        "description": "The text. Only an assistant's message with `tool_calls` may be without.",
    },
    "Message.name": {"description": "Who speaks, where a role has several speakers."},
    "Message.tool_calls": {"description": "The calls that the assistant made, as a reply had them."},
    "Message.tool_call_id": {"description": "The `id` of the call that this answers."},
    "Message.prefix": {
        "description": "On a last message: the reply continues this text.",
        "default": False,
    },
    "TextPart.type": {"const": "text"},
    "TextPart.text": {"description": "Parts are joined by line feeds."},
    "ToolCall.id": {"description": "Names the call; its result names it as `tool_call_id`."},
    "ToolCall.type": {"const": "function"},
    "ToolCall.function": {},
    "CalledFunction.name": {},
    "CalledFunction.arguments": {"description": "JSON in a string."},
    "ResponseFormat.type": {
        "description": "`json_object`: the reply is one JSON object. `json_schema`: one JSON value of `json_schema`. "
        "What does not fit can't be generated; only a reply that is cut short may be incomplete.",
        "enum": ["text", "json_object", "json_schema"],
    },
    "ResponseFormat.json_schema": {
        "description": "For `json_schema`. With `strict`, a keyword of `schema` that can't be enforced answers 422.",
        "properties": {
            "name": {"type": "string", "pattern": _NAME, "description": "For you; the model does not see it."},
            "schema": {"type": "object", "description": "A JSON Schema."},
            "strict": {"type": ["boolean", "null"], "default": False},
        },
        "required": ["name", "schema"],
    },
    "Tool.type": {"const": "function"},
    "Tool.function": {},
    "Function.name": {"pattern": _NAME},
    "Function.description": {"description": "What it does and when to call it: the model reads this."},
    "Function.parameters": {"description": "The JSON Schema of the arguments, an object's."},
    "Function.strict": {
        "description": "Arguments always validate against `parameters`.",
        "default": False,
    },
    "NamedTool.type": {"const": "function"},
    "NamedTool.function": {},
    "FunctionName.name": {"description": "One of `tools`."},
}
"""Model and field to keywords of JSON Schema; `branches` go into one type of several."""
