"""Describes POST /messages and /messages/count_tokens for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from serve_app.admin import responses
from serve_app.admin.values import Schema
from serve_app.api.chat_openapi import REF
from serve_app.api.messages_door import ERRORS, MessagesDoor
from serve_app.api.messages_models import EVENTS, MessageReply, TokenCount
from serve_app.api.messages_openapi import messages_schemas

REPLIES: Final = (MessageReply, TokenCount, *EVENTS)
_RETRY: Final = ("retry-after", "retry-after-ms")
_HEADERS: Final = {401: ("www-authenticate",), 409: _RETRY, 429: (*_RETRY, *responses.RATE_LIMITS), 529: _RETRY}
_MEANINGS: Final = {
    400: "Not JSON, a missing field, a wrong type or value, or a prompt that is too long. The message names the field.",
    401: "The key is missing, malformed, unknown, revoked or expired, or its account is suspended.",
    402: "The balance does not cover the prompt and one token, or the key's budget is spent.",
    403: "The key is restricted to other addresses.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    409: "A request with the same `idempotency-key` is still running. Try again.",
    413: "The body is too large.",
    429: "A limit is reached. Try again after the time in `retry-after`.",
    500: "The service failed. Try again.",
    529: "No capacity at the moment. Try again.",
}
_RULES: Final = (
    "null is the same as absent. Unknown fields are ignored, and so is the version in `anthropic-version`. The key may "
    "also be sent as `x-api-key`.\n\n"
    "Rules that the schema does not express: write integers without a decimal point; `tools` does not repeat a name; "
    "`tool_choice: any` needs a tool in `tools`, "
    "and a tool that `tool_choice` names must be in `tools`; a message with `tool_use` is not the last one; "
    "messages fit into the context; a JSON Schema has a maximum size and only keywords that can be enforced. "
    "`image` and `document` blocks, tools that the service would run, `mcp_servers` and `output_format` return 400."
)
_STREAM: Final = (
    "With `stream: true`, the reply is a stream of server-sent events, in this order: `message_start`; for each block "
    "`content_block_start`, `content_block_delta` and `content_block_stop`; `message_delta` with the usage; "
    "`message_stop`. `ping` may come at any time. If the reply fails after the headers were sent, the stream ends with "
    "an `error` event. The schema describes one event."
)
_EXAMPLE: Final[Schema] = {
    "model": "svc-chat",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hello"}],
}
_INPUT: Final = '{"input_tokens":9,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":'
_EXAMPLE_STREAM: Final = "".join(
    f'event: {kind}\ndata: {{"type":"{kind}"{rest}}}\n\n'
    for kind, rest in (
        (
            "message_start",
            ',"message":{"id":"msg_1","type":"message","role":"assistant","model":"svc-chat","content":[],'
            f'"stop_reason":null,"stop_sequence":null,"usage":{_INPUT}0,"output_tokens_details":'
            '{"thinking_tokens":0}}}',
        ),
        ("content_block_start", ',"index":0,"content_block":{"type":"text","text":""}'),
        ("content_block_delta", ',"index":0,"delta":{"type":"text_delta","text":"Hello!"}'),
        ("content_block_stop", ',"index":0'),
        (
            "message_delta",
            f',"delta":{{"stop_reason":"end_turn","stop_sequence":null}},"usage":{_INPUT}2,'
            '"output_tokens_details":{"thinking_tokens":0}}',
        ),
        ("message_stop", ""),
    )
)


def paths() -> dict[str, Schema]:
    """Returns the operations by path."""
    reply = responses.json_response(
        f"The reply. If it takes long, the body begins with line feeds before the JSON.\n\n{_STREAM}",
        "MessageReply",
        ("request-id", "x-trace-id", "server-timing", *responses.RATE_LIMITS, "idempotency-replayed"),
    )
    reply["content"][MessagesDoor.stream_type.partition(";")[0]] = {
        "schema": {"$ref": f"{REF}MessageEvent"},
        "examples": {"stream": {"summary": "A short stream", "value": _EXAMPLE_STREAM}},
    }
    create = _operation("createMessage", "Create a message", _RULES, "MessagesRequest", reply, tuple(_MEANINGS))
    create["parameters"] = responses.parameters("IdempotencyKey", "RequestId")
    counted = responses.json_response("The number of tokens.", "TokenCount", ("request-id",))
    free = (
        "Free of charge: nothing is billed, and no balance is needed. It has the same limits as `/tokenize`. The count "
        "is exact: a message with these fields is billed for this number of prompt tokens.\n\n"
    )
    statuses = tuple(status for status in _MEANINGS if status not in (402, 409))
    count = _operation(
        "countTokens", "Count the tokens of a message", free + _RULES, "CountTokensRequest", counted, statuses
    )
    return {"/messages": {"post": create}, "/messages/count_tokens": {"post": count}}


def schemas(identifiers: Sequence[str]) -> dict[str, Schema]:
    """Returns the schemas of bodies and errors by name."""
    return {**messages_schemas(identifiers), "MessageEvent": _event()}


def _event() -> Schema:
    """Returns the schema of one stream event, modelled as in OpenAPI 3.2: `data` is text that contains JSON."""
    kinds = [{"$ref": REF + one.__name__} for one in EVENTS] + [{"$ref": f"{REF}MessagesError"}]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"oneOf": kinds}}
    return {
        "description": "One event of a stream. `event` is the type of the data.",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["event", "data"],
    }


def _operation(
    name: str, summary: str, description: str, body: str, reply: Schema, statuses: tuple[int, ...]
) -> Schema:
    content: dict[str, Any] = {
        "schema": {"$ref": REF + body},
        "examples": {"small": {"summary": "A question", "value": _EXAMPLE}},
    }
    return {
        "operationId": name,
        "tags": ["Messages"],
        "summary": summary,
        "description": description,
        "security": [{"apiKey": []}],
        "parameters": responses.parameters("RequestId"),
        "requestBody": {"required": True, "content": {"application/json": content}},
        "responses": {"200": reply, **{str(status): _error(status) for status in statuses}},
    }


def _error(status: int) -> Schema:
    meaning = f"`{ERRORS[status]}`: {_MEANINGS[status]}"
    return responses.json_response(meaning, "MessagesError", ("request-id", *_HEADERS.get(status, ())))
