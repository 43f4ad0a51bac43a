"""The operations that API keys open, and the two that need none."""

from __future__ import annotations

from typing import Any, Final

from serve_app.gateway.openapi.chat_examples import EXAMPLES
from serve_app.gateway.openapi.responses import RATE_LIMITS, errors, headers, json_response, parameters

Schema = dict[str, Any]

_API_KEY: Final[list[Schema]] = [{"apiKey": []}]
_DAY: Final = {"type": "string", "format": "date"}

_STREAM: Final = (
    "With `stream: true`. Each event is a line `data: ` with JSON and an empty line; no other fields are used. The "
    "events of a choice are: an opening chunk with the role, chunks with what is new, and a chunk with an empty "
    "`delta` and the finish reason. With `include_usage` a chunk with the usage and without choices follows. The "
    "stream ends with `data: [DONE]`. Lines that begin with a colon are comments that keep the connection alive. A "
    "failure after the headers is one event with an `Error`, and then the stream ends without `[DONE]`. The schema is "
    "that of one event."
)


def public_paths() -> dict[str, Schema]:
    """Path items by path, without prefix."""
    return {
        "/chat/completions": {"post": _chat()},
        "/models": {
            "get": {
                "operationId": "listModels",
                "tags": ["Models"],
                "summary": "The identifiers that are served",
                "security": _API_KEY,
                "parameters": parameters("RequestId"),
                "responses": {"200": json_response("All of them.", "ModelList"), **errors(401, 429, 500, 503)},
            }
        },
        "/models/{id}": {
            "get": {
                "operationId": "getModel",
                "tags": ["Models"],
                "summary": "One identifier",
                "security": _API_KEY,
                "parameters": [path_parameter("id", "An identifier."), *parameters("RequestId")],
                "responses": {"200": json_response("It.", "Model"), **errors(401, 404, 429, 500, 503)},
            }
        },
        "/user/balance": {
            "get": {
                "operationId": "getBalance",
                "tags": ["Account"],
                "summary": "What your account has left",
                "security": _API_KEY,
                "parameters": parameters("RequestId"),
                "responses": {"200": json_response("The balance.", "Balance"), **errors(401, 429, 500, 503)},
            }
        },
        "/user/usage": {
            "get": {
                "operationId": "getUsage",
                "tags": ["Account"],
                "summary": "What your account has used",
                "security": _API_KEY,
                "parameters": [*usage_parameters("day", "model", "key"), *parameters("RequestId")],
                "responses": {"200": json_response("Sums by group.", "UsageList"), **errors(401, 422, 429, 500, 503)},
            }
        },
        "/health": {
            "get": {
                "operationId": "getHealth",
                "tags": ["Service"],
                "summary": "Whether the service is alive",
                "security": [],
                "parameters": parameters("RequestId"),
                "responses": {"200": json_response("It is.", "Health"), **errors(500)},
            }
        },
        "/ready": {
            "get": {
                "operationId": "getReady",
                "tags": ["Service"],
                "summary": "Whether the service can answer chat requests",
                "security": [],
                "parameters": parameters("RequestId"),
                "responses": {"200": json_response("It can.", "Ready"), **errors(500, 503)},
            }
        },
    }


def _chat() -> Schema:
    whole = json_response("", "ChatCompletion", ("server-timing", *RATE_LIMITS))
    whole["description"] = (
        "The reply. One that takes longer than some seconds begins early, with line feeds before its JSON.\n\n"
        + _STREAM
    )
    whole["headers"] |= headers("idempotency-replayed")
    whole["content"]["text/event-stream"] = {
        "schema": {"$ref": "#/components/schemas/ChatCompletionEvent"},
        "examples": {"stream": {"summary": "A short stream", "value": _EXAMPLE_STREAM}},
    }
    return {
        "operationId": "createChatCompletion",
        "tags": ["Chat"],
        "summary": "A reply to a conversation, whole or streamed",
        "description": (
            "null is the same as absent, and unknown fields are ignored. A wrong type answers 400, a wrong value 422. "
            "Errors are told in the order 401, 400, 422, 402, 429, 503. A refused request costs nothing and counts "
            "against no limit.\n\n"
            "Rules that the schema does not show: an integer is written without a decimal point; `prefix` is only for "
            "the last message; `max_tokens` and `max_completion_tokens` are equal if both are given; `min_tokens` is "
            "at most `max_tokens`; names of `tools` do not repeat; `tool_choice` is `required` or names a function "
            "only if `tools` has it; messages fit the context; a JSON Schema is of bounded size."
        ),
        "security": _API_KEY,
        "parameters": parameters("IdempotencyKey", "RequestId"),
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/ChatCompletionRequest"},
                    "examples": dict(EXAMPLES),
                }
            },
        },
        "responses": {"200": whole, **errors(400, 401, 402, 408, 409, 422, 429, 500, 503)},
    }


def path_parameter(name: str, description: str) -> Schema:
    """A part of the path."""
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def query_parameter(name: str, description: str, schema: Schema, **more: Any) -> Schema:
    """An optional part of the query."""
    return {"name": name, "in": "query", "description": description, "schema": schema, **more}


def usage_parameters(*groups: str) -> list[Schema]:
    """Which days of usage, and how they are grouped."""
    by = {"type": "array", "items": {"type": "string", "enum": list(groups)}, "default": ["day"]}
    return [
        query_parameter("from", "The first day, in UTC.", _DAY),
        query_parameter("to", "The last day, in UTC.", _DAY),
        query_parameter("group_by", "With commas between.", by, style="form", explode=False),
    ]


_HEAD: Final = (
    '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1767225600,"model":"svc-chat",'
    '"system_fingerprint":"fp_1","choices":[{"index":0,"delta":'
)
_OPEN: Final = ',"logprobs":null,"finish_reason":null}]}'
_EXAMPLE_STREAM: Final = "".join(
    f"data: {data}\n\n"
    for data in (
        _HEAD + '{"role":"assistant","content":""}' + _OPEN,
        _HEAD + '{"content":"Hello."}' + _OPEN,
        _HEAD + '{},"logprobs":null,"finish_reason":"stop"}]}',
        "[DONE]",
    )
)
