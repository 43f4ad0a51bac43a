"""Describes POST /responses for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from serve_app.admin import responses
from serve_app.admin.values import Schema
from serve_app.api.chat_openapi import REF
from serve_app.api.responses_door import ResponsesDoor
from serve_app.api.responses_models import Response, ResponseEventData, ResponseInputTokens, ResponseItemList
from serve_app.api.responses_openapi import NAME, responses_request_schemas
from serve_app.api.responses_request import REFUSED

REPLIES: Final = (Response, ResponseEventData, ResponseInputTokens, ResponseItemList)

_STREAM: Final = (
    "With `stream: true`, the reply is a stream of server-sent events. Each event is a line `event: ` followed by its "
    "type, a line `data: ` followed by JSON, and then an empty line. `sequence_number` counts the events. Each item of "
    "the output has events when it is added, for each piece, and when it is done. The last event is "
    "`response.completed`, `response.incomplete` or `response.failed`, with the whole response. Lines that begin with "
    "a colon are comments that keep the connection open. The schema describes one event."
)
_EXAMPLES: Final[dict[str, Any]] = {
    "text": {"summary": "A question", "value": {"model": "svc-chat", "input": "Say hello."}},
    "stream": {
        "summary": "A stream",
        "value": {"model": "svc-chat", "instructions": "Be brief.", "input": "Say hello.", "stream": True},
    },
    "result": {
        "summary": "The result of a call",
        "value": {
            "model": "svc-chat",
            "input": [
                {"role": "user", "content": "How warm is it?"},
                {"type": "function_call", "call_id": "call_1", "name": "thermometer", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"},
            ],
            "tools": [{"type": "function", "name": "thermometer", "parameters": {"type": "object"}}],
            "store": False,
        },
    },
}


def paths(refused_requests: str) -> dict[str, Schema]:
    """Returns the operations by path. `refused_requests` says which refused requests count towards limits."""
    return {
        "/responses": {"post": _create(refused_requests)},
        "/responses/input_tokens": {"post": _count()},
    }


def _count() -> Schema:
    return {
        "operationId": "countResponseInputTokens",
        "tags": ["Responses"],
        "summary": "Count the input tokens of a response",
        "description": "Takes the body of `/responses`. Nothing is generated or billed.",
        "security": [{"apiKey": []}],
        "parameters": responses.parameters("RequestId"),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": REF + NAME}}},
        },
        "responses": {
            "200": responses.json_response("The number of tokens.", ResponseInputTokens.__name__),
            **responses.errors(400, 401, 403, 404, 408, 422, 429, 500, 503),
        },
    }


def _create(refused_requests: str) -> Schema:
    reply = responses.json_response(
        "The response. If it takes long, the body begins with line feeds before the JSON.\n\n" + _STREAM,
        Response.__name__,
        ("x-trace-id", "server-timing", *responses.RATE_LIMITS, "idempotency-replayed"),
    )
    reply["content"][ResponsesDoor.stream_type.partition(";")[0]] = {"schema": {"$ref": f"{REF}ResponseEvent"}}
    return {
        "operationId": "createResponse",
        "tags": ["Responses"],
        "summary": "Create a response",
        "description": (
            "null is the same as absent. Unknown fields are ignored. A wrong type returns 400, a wrong value 422. "
            f"{refused_requests}\n\n"
            "Rules that the schema does not express: write integers without a decimal point; an item of `input` whose "
            "type the schema does not list returns 422; a part of a message is text; `tools` does not repeat a name; "
            "if `tool_choice` is `required` or names a tool, `tools` must have one that the model can call; "
            "`stream_options.resume` needs `stream: true`; an item reference names an item of a stored response; items "
            "fit into the context; a JSON Schema has a maximum size. Fields that would change the reply and are not "
            "supported return 422: " + ", ".join(f"`{name}`" for name in REFUSED) + "."
        ),
        "security": [{"apiKey": []}],
        "parameters": responses.parameters("IdempotencyKey", "RequestId"),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": REF + NAME}, "examples": _EXAMPLES}},
        },
        "responses": {"200": reply, **responses.errors(400, 401, 402, 403, 404, 408, 409, 422, 429, 500, 503)},
    }


def schemas(identifiers: Sequence[str]) -> dict[str, Schema]:
    return {**responses_request_schemas(identifiers), "ResponseEvent": _event()}


def _event() -> Schema:
    """Returns the schema of one stream event, modelled as in OpenAPI 3.2: `data` is text that contains JSON."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": f"{REF}{ResponseEventData.__name__}"},
        "examples": [
            '{"type":"response.output_text.delta","sequence_number":4,"item_id":"msg_1","output_index":0,'
            '"content_index":0,"delta":"Hello.","logprobs":[]}'
        ],
    }
    return {
        "description": "One event of a stream.",
        "type": "object",
        "properties": {"event": {"type": "string", "examples": ["response.output_text.delta"]}, "data": data},
        "required": ["event", "data"],
    }
