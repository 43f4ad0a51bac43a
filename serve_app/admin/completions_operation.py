"""Describes POST /completions for the OpenAPI document."""

from __future__ import annotations

from typing import Final

from serve_app.admin import responses
from serve_app.admin.values import Schema
from serve_app.api.chat_openapi import REF
from serve_app.api.completions_door import CompletionsDoor
from serve_app.api.completions_request import MAX_CHOICES, UNSUPPORTED

_STREAM: Final = (
    "With `stream: true`, the reply is a stream of server-sent events. Each event is a line `data: ` with JSON and an "
    "empty line. A choice has chunks with new text, and a last chunk with the finish reason. With `include_usage`, a "
    "chunk with the usage and without choices follows. The stream ends with `data: [DONE]`. Lines that begin with a "
    "colon are comments that keep the connection open. If the reply fails after the headers were sent, the stream ends "
    "with an `Error` event and without `[DONE]`. The schema describes one event."
)
_HEAD: Final = (
    '{"id":"cmpl-1","object":"text_completion","created":1767225600,"model":"svc-chat","system_fingerprint":"fp_1",'
    '"choices":[{"index":0,"text":'
)
_EXAMPLE_STREAM: Final = "".join(
    f"data: {data}\n\n"
    for data in (
        _HEAD + '" Paris.","logprobs":null,"finish_reason":null}]}',
        _HEAD + '"","logprobs":null,"finish_reason":"stop"}]}',
        "[DONE]",
    )
)
EXAMPLES: Final = {
    "text": {
        "summary": "A text to continue",
        "value": {"model": "svc-chat", "prompt": "The capital of France is", "max_tokens": 5, "temperature": 0},
    },
    "scores": {
        "summary": "The probabilities of two texts",
        "value": {
            "model": "svc-chat",
            "prompt": ["The sky is blue.", "The sky is green."],
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
        },
    },
}


def completions_operation(refused: str) -> Schema:
    """Returns the operation. `refused` is the text that says which refused requests count towards limits."""
    reply = responses.json_response(
        "The reply. If it takes long, the body begins with line feeds before the JSON.\n\n" + _STREAM,
        "Completion",
        ("x-trace-id", "server-timing", *responses.RATE_LIMITS, "idempotency-replayed"),
    )
    reply["content"][CompletionsDoor.stream_type.partition(";")[0]] = {
        "schema": {"$ref": f"{REF}CompletionEvent"},
        "examples": {"stream": {"summary": "A short stream", "value": _EXAMPLE_STREAM}},
    }
    return {
        "operationId": "createCompletion",
        "tags": ["Completions"],
        "summary": "Create a text completion",
        "description": (
            "Continues texts without a chat template. null is the same as absent. Unknown fields are ignored. A wrong "
            f"type returns 400, a wrong value 422. {refused}\n\n"
            "Rules that the schema does not express: write integers without a decimal point; all prompts together have "
            f"at most {MAX_CHOICES} choices; `max_tokens` of 0 needs `echo`; `best_of` is equal to `n`; `suffix` needs "
            "texts as prompts, no `echo`, and a model that fills in the middle; `min_tokens` is at most `max_tokens`; "
            "`resume` needs one choice without `logprobs`, `echo` and `return_token_ids`; a prompt has at least one "
            "token and fits into the context; only one field sets the format of the reply. "
            "Fields of other servers that would change the reply return 422: "
            + ", ".join(f"`{name}`" for name in UNSUPPORTED)
            + "."
        ),
        "security": [{"apiKey": []}],
        "parameters": responses.parameters("IdempotencyKey", "RequestId"),
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": f"{REF}CompletionRequest"}, "examples": dict(EXAMPLES)}
            },
        },
        "responses": {"200": reply, **responses.errors(400, 401, 402, 403, 408, 409, 422, 429, 500, 503)},
    }
