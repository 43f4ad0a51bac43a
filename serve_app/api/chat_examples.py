"""Example chat requests for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

EXAMPLES: Final[Mapping[str, Any]] = {
    "conversation": {
        "summary": "A conversation",
        "value": {
            "model": "svc-chat",
            "messages": [
                {"role": "system", "content": "You answer in one sentence."},
                {"role": "user", "content": "Why is the sky blue?"},
            ],
            "max_tokens": 200,
        },
    },
    "stream": {
        "summary": "A stream that ends with its usage",
        "value": {
            "model": "svc-chat",
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
    "tools": {
        "summary": "A function that the model may call",
        "value": {
            "model": "svc-chat",
            "messages": [{"role": "user", "content": "How warm is it in Oslo?"}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "temperature",
                        "description": "The temperature of a place now, in degrees Celsius",
                        "parameters": {
                            "type": "object",
                            "properties": {"place": {"type": "string"}},
                            "required": ["place"],
                            "additionalProperties": False,
                        },
                    },
                }
            ],
        },
    },
    "json": {
        "summary": "A reply that is JSON of a schema",
        "value": {
            "model": "svc-coder",
            "messages": [{"role": "user", "content": "Is 91 prime? Answer as JSON."}],
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "strict": True,
                    "schema": {
                        "type": "object",
                        "properties": {"prime": {"type": "boolean"}},
                        "required": ["prime"],
                        "additionalProperties": False,
                    },
                },
            },
        },
    },
}
