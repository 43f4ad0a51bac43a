"""Generates the OpenAPI document from the declared endpoints and the models of their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from pydantic.json_schema import models_json_schema

from serve_app import __version__
from serve_app.admin import (
    accounts,
    backends,
    keys,
    live,
    models,
    own_account,
    own_alerts,
    own_keys,
    people,
    public,
    requests,
    responses,
    sealed_secrets,
    service,
    traffic,
    usage,
)
from serve_app.admin.endpoint import Endpoint
from serve_app.admin.values import Reply, Schema
from serve_app.api.chat_examples import EXAMPLES
from serve_app.api.chat_openapi import REF, chat_request_schemas
from serve_app.api.reply_models import ChatCompletion, ChatCompletionChunk
from serve_app.api.structured_outputs import REFUSED
from serve_app.settings import IdentifierSettings

#: All endpoints except chat, in the order of the document.
ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *public.of_models,
    *public.of_account,
    *own_account.endpoint,
    *own_keys.endpoint,
    *own_alerts.endpoint,
    *public.of_service,
    *accounts.endpoint,
    *keys.endpoint,
    *sealed_secrets.endpoint,
    *people.endpoint,
    *usage.endpoint,
    *requests.endpoint,
    *models.endpoint,
    *traffic.endpoint,
    *backends.endpoint,
    *service.endpoint,
    *live.endpoint,
)

_ABOUT: Final = """\
Chat completions in the format that common SDKs speak: set their base address to this service and send your API key.

Each path exists under `/` and under `/v1`, alike; the "v1" says nothing about a model. Bodies are JSON in UTF-8.
Every answer carries `x-request-id`. Errors are JSON too: what does not exist answers 404, a method that a path does \
not have 405, both with the body of `Error`. An integer is written without a decimal point.
"""
_TAGS: Final = {
    "Chat": "Replies of models.",
    "Models": "What is served.",
    "Account": "Your balance and usage.",
    "Account management": "With a management key of your account: its keys, usage, requests and alerts.",
    "Service": "Whether it runs. No key needed.",
    "Operator: Accounts": "With the operator's key: accounts, funds and limits.",
    "Operator: Keys": "With the operator's key: API keys.",
    "Operator: People": "With the operator's key: who may sign in to the console.",
    "Operator: Usage": "With the operator's key: everybody's usage.",
    "Operator: Requests": "With the operator's key: one request, from its id.",
    "Operator: Models": "With the operator's key: identifiers, their traffic and prices, and backends.",
    "Operator: Service": "With the operator's key: books and audit log.",
}
_PATH_PARAMETERS: Final = {
    "id": "An identifier.",
    "account_id": "An account's id.",
    "alert_id": "An alert's id.",
    "grant_id": "A grant's number.",
    "invitation_id": "An invitation's id.",
    "key_id": "A key's id.",
    "name": "A backend's name.",
    "request_id": "A request's id, its client's `x-request-id`, or its trace id.",
}


def build_document(identifiers: Mapping[str, IdentifierSettings]) -> Schema:
    """Returns the OpenAPI 3.1 document, as JSON values, of a service with these identifiers."""
    most_output = max((model.max_output for model in identifiers.values()), default=1)
    paths: dict[str, Schema] = {"/chat/completions": {"post": _chat()}}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    returned = [endpoint.types["return"] for endpoint in ENDPOINTS]
    replies = [ChatCompletion, ChatCompletionChunk, *(kind for kind in returned if issubclass(kind, Reply))]
    bodies = [endpoint.types["body"] for endpoint in ENDPOINTS if "body" in endpoint.types]
    return {
        "openapi": "3.1.0",
        "info": {"title": "serve-app", "version": __version__, "description": _ABOUT},
        "servers": [
            {"url": "/v1", "description": "As SDKs write it"},
            {"url": "/", "description": "The same, shorter"},
        ],
        "tags": [{"name": name, "description": description} for name, description in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": {
                **chat_request_schemas(tuple(identifiers), most_output),
                "ChatCompletionEvent": _event(),
                **_generated(replies, "serialization"),
                **_generated(bodies, "validation"),
                **responses.error_schemas(),
            },
            "responses": responses.error_responses(),
            "headers": dict(responses.HEADERS),
            "parameters": dict(responses.PARAMETERS),
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer", "description": "An API key of your account."},
                "managementKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A management key of your account: for `/account` alone, made in the console.",
                },
                "operatorKey": {"type": "http", "scheme": "bearer", "description": "The service's operator key."},
            },
        },
    }


def _operation(endpoint: Endpoint) -> Schema:
    given = [_path_parameter(name) for name in re.findall(r"{(\w+)}", endpoint.path)]
    given += _query_parameters(endpoint.types["query"]) if "query" in endpoint.types else []
    shared = ["RequestId"]
    shared += ["Operator"] if "audit" in endpoint.types and endpoint.key == "operatorKey" else []
    shared += ["ChangeKey"] if {"idempotency_key", "once"} & endpoint.types.keys() else []
    success = endpoint.success
    if isinstance(success, str):
        success = responses.json_response(success, endpoint.types["return"].__name__)
    operation: Schema = {
        "operationId": endpoint.operation_id or to_camel(endpoint.handler.__name__),
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "security": [{endpoint.key: []}] if endpoint.key is not None else [],
        "parameters": given + responses.parameters(*shared),
        "responses": {str(endpoint.status): success, **responses.errors(*endpoint.error_statuses)},
    }
    if "body" in endpoint.types:
        body: type[BaseModel] = endpoint.types["body"]
        operation["requestBody"] = {
            "required": any(field.is_required() for field in body.model_fields.values()),
            "content": {"application/json": {"schema": {"$ref": REF + body.__name__}}},
        }
    return operation


def _path_parameter(name: str) -> Schema:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": _PATH_PARAMETERS[name], "schema": schema}


def _query_parameters(model: type[BaseModel]) -> list[Schema]:
    made = []
    for name, schema in _without_noise(model.model_json_schema(), "validation")["properties"].items():
        description = schema.pop("description")
        kinds = [kind for kind in schema.pop("anyOf", ()) if kind != {"type": "null"}]
        parameter = {"name": name, "in": "query", "description": description}
        parameter["schema"] = schema | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})
        if schema.get("type") == "array":
            parameter |= {"style": "form", "explode": False}  # comma-separated
        made.append(parameter)
    return made


def _generated(models: Iterable[type[BaseModel]], mode: Literal["serialization", "validation"]) -> dict[str, Schema]:
    _, generated = models_json_schema([(model, mode) for model in models], ref_template=REF + "{model}")
    return {name: _without_noise(schema, mode) for name, schema in generated["$defs"].items()}


def _without_noise(schema: Any, mode: str) -> Any:
    """Returns the schema without titles that repeat names, null defaults, and any defaults of a reply."""
    if isinstance(schema, list):
        return [_without_noise(one, mode) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: Schema = {}
    for name, value in schema.items():
        if name == "properties":
            kept[name] = {field: _without_noise(one, mode) for field, one in value.items()}
        elif not (name == "title" or (name == "default" and (value is None or mode == "serialization"))):
            kept[name] = _without_noise(value, mode)
    return kept


# Chat has its own route, and its operation says more than an Endpoint can declare.

_STREAM: Final = (
    "With `stream: true`. Each event is a line `data: ` with JSON and an empty line; no other fields are used. The "
    "events of a choice are: an opening chunk with the role, chunks with what is new, and a chunk with an empty "
    "`delta` and the finish reason. With `include_usage` a chunk with the usage and without choices follows. The "
    "stream ends with `data: [DONE]`. Lines that begin with a colon are comments that keep the connection alive. A "
    "failure after the headers is one event with an `Error`, and then the stream ends without `[DONE]`. The schema is "
    "that of one event."
)
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


def _chat() -> Schema:
    reply = responses.json_response(
        "The reply. One that takes longer than some seconds begins early, with line feeds before its JSON.\n\n"
        + _STREAM,
        "ChatCompletion",
        ("x-trace-id", "server-timing", *responses.RATE_LIMITS, "idempotency-replayed"),
    )
    reply["content"]["text/event-stream"] = {
        "schema": {"$ref": f"{REF}ChatCompletionEvent"},
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
            "Rules that the schema does not show: an integer is written without a decimal point; `prefix` is only "
            "for the last message; `max_tokens` and `max_completion_tokens` are equal if both are given; "
            "`min_tokens` is at most `max_tokens`; `resume` is for one choice without `logprobs`; names of `tools` "
            "do not repeat; `tool_choice` is `required` or names a function only if `tools` has it; messages fit the "
            "context; a JSON Schema is of bounded size; one field says the form of the reply, and a regular "
            "expression or choices are not sent beside tools that may be called. "
            "Fields of other servers that ask for a form which is not enforced answer 422: "
            + ", ".join(f"`{name}`" for name in REFUSED)
            + "."
        ),
        "security": [{"apiKey": []}],
        "parameters": responses.parameters("IdempotencyKey", "RequestId"),
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": f"{REF}ChatCompletionRequest"},
                    "examples": dict(EXAMPLES),
                }
            },
        },
        "responses": {"200": reply, **responses.errors(400, 401, 402, 403, 408, 409, 422, 429, 500, 503)},
    }


def _event() -> Schema:
    """Returns the schema of one stream event, modelled as in OpenAPI 3.2: `data` is text that contains JSON."""
    kinds = [{"$ref": f"{REF}ChatCompletionChunk"}, {"$ref": f"{REF}Error"}]
    json = {"title": "JSON", "contentMediaType": "application/json", "contentSchema": {"oneOf": kinds}}
    return {
        "description": "One event of a stream.",
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"title": "The end", "const": "[DONE]"}, json]}},
        "required": ["data"],
    }
