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
        "summary": "A reply in JSON that matches a schema",
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
#: A reply to the first example request.
EXAMPLE_REPLY: Final[Mapping[str, Any]] = {
    "id": "chatcmpl-5d41402abc4b2a76b9719d911017c592",
    "object": "chat.completion",
    "created": 1790000000,
    "model": "svc-chat",
    "system_fingerprint": "fp_1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Air scatters blue light most."},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {
        "prompt_tokens": 28,
        "completion_tokens": 8,
        "total_tokens": 36,
        "prompt_tokens_details": {"cached_tokens": 0},
        "prompt_cache_hit_tokens": 0,
        "prompt_cache_miss_tokens": 28,
        "completion_tokens_details": {"reasoning_tokens": 0},
    },
}
