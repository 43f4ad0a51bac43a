"""Generates the OpenAPI document from the declared endpoints and the models of their bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
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
    messages_operations,
    models,
    own_account,
    own_alerts,
    own_keys,
    people,
    public,
    requests,
    responses,
    responses_document,
    sealed_secrets,
    service,
    statements,
    stored_responses,
    token_operations,
    traffic,
    usage,
)
from serve_app.admin.code_samples import add_code_samples
from serve_app.admin.completions_operation import completions_operation
from serve_app.admin.endpoint import Endpoint
from serve_app.admin.values import Reply, Schema
from serve_app.api.chat_door import ChatDoor
from serve_app.api.chat_examples import EXAMPLE_REPLY, EXAMPLES
from serve_app.api.chat_openapi import REF, chat_request_schemas
from serve_app.api.completions_models import Completion, CompletionChunk
from serve_app.api.completions_openapi import completion_request_schemas
from serve_app.api.refused_fields import REFUSED
from serve_app.api.reply_models import ChatCompletion, ChatCompletionChunk
from serve_app.settings import IdentifierSettings

#: All endpoints in the order of the document, except those of the wire formats (`api/doors.py`).
ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *stored_responses.endpoint,
    *public.of_models,
    *public.of_account,
    *own_account.endpoint,
    *own_keys.endpoint,
    *own_alerts.endpoint,
    *public.of_service,
    *accounts.endpoint,
    *statements.endpoint,
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
Set the base URL of your SDK to this service, and use your API key.

Every path works with and without `/v1`. Bodies are JSON in UTF-8; write integers without a decimal point. Every \
response has `x-request-id`. Errors have the body `Error`, including 404 for an unknown path and 405 for a method that \
the path does not support.
"""
REFUSED_REQUESTS: Final = """\
Errors are checked in the order 401, 403, 400, 422, 409, 402, 429, 503. Some 422 errors come last, because they need \
the model: a prompt that is too long, a `logit_bias` for an id that is not a token, a schema that can't be enforced.

A refused request is not billed. It does not count against a limit, except for a 422 that needs the model: that counts \
as one request with its prompt."""
"""The order of errors, and the refused requests that count against a limit. `docs/api.md` has the same text."""
_TAGS: Final = {
    "Chat": "Reply to a conversation.",
    "Responses": "Reply in the Responses format. Stored replies can be read again.",
    "Messages": "Reply in the Messages format of the Anthropic SDKs.",
    "Tokens": "Convert text to tokens and back.",
    "Completions": "Continue a text, without a chat template.",
    "Models": "List the models that you can call.",
    "Account": "Read your balance and usage, with an API key.",
    "Account management": "Manage keys and alerts, and read usage, with a management key.",
    "Service": "Check whether the service is up. No key is needed.",
    "Operator: Accounts": "Accounts, funds and limits.",
    "Operator: Keys": "API keys.",
    "Operator: People": "Users of the console.",
    "Operator: Usage": "Usage of all accounts.",
    "Operator: Requests": "Details of a request.",
    "Operator: Models": "Model identifiers, traffic, prices and backends.",
    "Operator: Service": "Ledger checks, audit log and live view.",
}
#: Groups of the operations for customers.
CUSTOMER_TAGS: Final = tuple(name for name in _TAGS if not name.startswith("Operator: "))
OPERATORS_PATH: Final = "/admin/"
_PATH_PARAMETERS: Final = {
    "month": "Month in UTC, such as 2026-11.",
    "id": "Model identifier.",
    "account_id": "Account id.",
    "alert_id": "Alert id.",
    "grant_id": "Grant number.",
    "invitation_id": "Invitation id.",
    "key_id": "Key id.",
    "name": "Backend name.",
    "response_id": "Response id.",
    "request_id": "Request id, the client's `x-request-id`, or trace id.",
}


def build_document(identifiers: Mapping[str, IdentifierSettings]) -> Schema:
    """Returns the OpenAPI 3.1 document, as JSON values, of a service with these identifiers."""
    max_output = max((model.max_output for model in identifiers.values()), default=1)
    names = (*identifiers, *(alias for model in identifiers.values() for alias in model.aliases))
    paths: dict[str, Schema] = {
        "/chat/completions": {"post": _chat()},
        "/completions": {"post": completions_operation(REFUSED_REQUESTS)},
        **responses_document.paths(REFUSED_REQUESTS),
        **messages_operations.paths(),
        **token_operations.paths(),
    }
    chat = chat_request_schemas(names, max_output)
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    returned = [endpoint.types["return"] for endpoint in ENDPOINTS]
    replies = [
        ChatCompletion,
        ChatCompletionChunk,
        Completion,
        CompletionChunk,
        *responses_document.REPLIES,
        *messages_operations.REPLIES,
        *token_operations.REPLIES,
        *(kind for kind in returned if issubclass(kind, Reply)),
    ]
    bodies = [endpoint.types["body"] for endpoint in ENDPOINTS if "body" in endpoint.types]
    return {
        "openapi": "3.1.0",
        "info": {"title": "serve-app", "version": __version__, "description": _ABOUT},
        "servers": [
            {"url": "/v1", "description": "The base URL for SDKs"},
            {"url": "/", "description": "The same operations without a version"},
        ],
        "tags": [{"name": name, "description": description} for name, description in _TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": {
                **chat,
                **completion_request_schemas(names, max_output),
                **messages_operations.schemas(names),
                **token_operations.schemas(chat["ChatCompletionRequest"], names),
                "ChatCompletionEvent": _event("ChatCompletionChunk"),
                "CompletionEvent": _event("CompletionChunk"),
                **responses_document.schemas(names),
                **_generated(replies, "serialization"),
                **_generated(bodies, "validation"),
                **responses.error_schemas(),
            },
            "responses": responses.error_responses(),
            "headers": dict(responses.HEADERS),
            "parameters": dict(responses.PARAMETERS),
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key of your account. It may also be sent as `x-api-key`.",
                },
                "managementKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A management key of your account, only for `/account`. Create it in the console.",
                },
                "operatorKey": {"type": "http", "scheme": "bearer", "description": "The service's operator key."},
            },
        },
    }


def customer_document(document: Schema) -> Schema:
    """Returns the part of a document that is for customers."""
    part = _part(document, lambda path: not path.startswith(OPERATORS_PATH))
    return add_code_samples({**part, "info": document["info"] | {"title": "API reference"}})


def operator_document(document: Schema) -> Schema:
    """Returns the part of a document that is for operators."""
    part = _part(document, lambda path: path.startswith(OPERATORS_PATH))
    about = {"title": "Operators' API reference", "description": "Every path needs the operator key."}
    tags = [tag | {"name": _short(tag["name"])} for tag in part["tags"]]
    paths = {
        path: {method: one | {"tags": [_short(tag) for tag in one["tags"]]} for method, one in item.items()}
        for path, item in part["paths"].items()
    }
    return add_code_samples({**part, "info": document["info"] | about, "tags": tags, "paths": paths})


def _short(tag: str) -> str:
    return tag.removeprefix("Operator: ")


def _part(document: Schema, has: Callable[[str], bool]) -> Schema:
    """Returns the document with only the paths that `has` accepts, and the tags, keys and components that they use."""
    paths = {path: item for path, item in document["paths"].items() if has(path)}
    operations = [operation for item in paths.values() for operation in item.values()]
    shown = {tag for operation in operations for tag in operation["tags"]}
    keys = {name for operation in operations for scheme in operation["security"] for name in scheme}
    every = document["components"]
    used: set[tuple[str, str]] = {("securitySchemes", name) for name in keys}
    waiting = _references(paths)
    while waiting:
        used |= waiting
        waiting = set().union(*(_references(every[kind][name]) for kind, name in waiting)) - used
    components = {kind: {name: one for name, one in every[kind].items() if (kind, name) in used} for kind in every}
    tags = [tag for tag in document["tags"] if tag["name"] in shown]
    return {**document, "paths": paths, "tags": tags, "components": components}


def _references(part: Any) -> set[tuple[str, str]]:
    """Returns kind and name of the components to which a part of the document refers."""
    if isinstance(part, list):
        return set().union(*map(_references, part))
    if not isinstance(part, dict):
        return set()
    found = set().union(*map(_references, part.values()))
    if isinstance(reference := part.get("$ref"), str):
        kind, _, name = reference.removeprefix("#/components/").partition("/")
        found.add((kind, name))
    return found


def _operation(endpoint: Endpoint) -> Schema:
    given = [_path_parameter(name) for name in re.findall(r"{(\w+)}", endpoint.path)]
    given += _query_parameters(endpoint.types["query"]) if "query" in endpoint.types else []
    shared = ["RequestId"]
    shared += ["Operator"] if "audit" in endpoint.types and endpoint.key == "operatorKey" else []
    shared += ["ChangeKey"] if {"idempotency_key", "once"} & endpoint.types.keys() else []
    success = endpoint.success
    if isinstance(success, str):
        success = responses.json_response(success, endpoint.types["return"].__name__)
    description = inspect.getdoc(endpoint.handler)
    operation: Schema = {
        "operationId": endpoint.operation_id or to_camel(endpoint.handler.__name__),
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        **({"description": description} if description else {}),
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
    """Returns the schema without null defaults and without titles, which repeat names. Replies lose all defaults."""
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


# Chat is not an Endpoint: its operation has more parts than an Endpoint can declare.

_STREAM: Final = (
    "With `stream: true`, the reply is a stream of server-sent events. Each event is a line `data: ` followed by JSON, "
    "and then an empty line. A choice has a first chunk with the role, chunks with new content, and a last chunk with "
    "an empty `delta` and the finish reason. The last chunk of the choice that ends last also has the usage; with "
    "`include_usage`, a further chunk without choices has it instead. The stream ends with `data: [DONE]`. Lines that "
    "begin with a colon are comments that keep the connection open. If the reply fails after the headers were sent, "
    "the stream ends with an `Error` event and without `[DONE]`. The schema describes one event."
)
_HEAD: Final = (
    '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1767225600,"model":"svc-chat",'
    '"system_fingerprint":"fp_1","choices":[{"index":0,"delta":'
)
_USAGE: Final = (
    '{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":0},'
    '"prompt_cache_hit_tokens":0,"prompt_cache_miss_tokens":5,"completion_tokens_details":{"reasoning_tokens":0}}'
)
_OPEN: Final = ',"logprobs":null,"finish_reason":null}]}'
_EXAMPLE_STREAM: Final = "".join(
    f"data: {data}\n\n"
    for data in (
        _HEAD + '{"role":"assistant","content":""}' + _OPEN,
        _HEAD + '{"content":"Hello."}' + _OPEN,
        _HEAD + '{},"logprobs":null,"finish_reason":"stop"}],"usage":' + _USAGE + "}",
        "[DONE]",
    )
)


def _chat() -> Schema:
    reply = responses.json_response(
        "The reply. If it takes long, the body begins with line feeds before the JSON.\n\n" + _STREAM,
        "ChatCompletion",
        ("x-trace-id", "server-timing", *responses.RATE_LIMITS, "idempotency-replayed"),
    )
    reply["content"]["application/json"]["examples"] = {"conversation": {"summary": "A reply", "value": EXAMPLE_REPLY}}
    reply["content"][ChatDoor.stream_type.partition(";")[0]] = {
        "schema": {"$ref": f"{REF}ChatCompletionEvent"},
        "examples": {"stream": {"summary": "A short stream", "value": _EXAMPLE_STREAM}},
    }
    return {
        "operationId": "createChatCompletion",
        "tags": ["Chat"],
        "summary": "Create a chat completion",
        "description": (
            "null is the same as absent. Unknown fields are ignored. A wrong type returns 400, a wrong value 422. "
            f"{REFUSED_REQUESTS}\n\n"
            "Rules that the schema does not express: write integers without a decimal point; `prefix` is only for the "
            "last message; `max_tokens` and `max_completion_tokens` are equal if both are sent; `min_tokens` is at "
            "most `max_tokens`; `resume` needs one choice without `logprobs`; `tools` does not repeat a name; "
            "`tool_choice` is `required` only with `tools`, and names only functions in `tools`; messages fit into the "
            "context; with `continue_final_message`, the last message must be the assistant's; `add_generation_prompt` "
            "is false only with it; `chat_template_kwargs` has at most 8 KiB, and only variables of the model's "
            "template; a JSON Schema has a maximum size; only one field sets the format of the reply; neither "
            "`guided_regex` nor `guided_choice` is possible together with tools that may be called. "
            "Fields of other services that would change the reply and are not supported return 422: "
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


def _event(chunk: str) -> Schema:
    """Returns the schema of one stream event, modelled as in OpenAPI 3.2: `data` is text that contains JSON."""
    kinds = [{"$ref": f"{REF}{chunk}"}, {"$ref": f"{REF}Error"}]
    json = {"title": "JSON", "contentMediaType": "application/json", "contentSchema": {"oneOf": kinds}}
    return {
        "description": "One event of a stream.",
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [{"title": "The end", "const": "[DONE]"}, json]}},
        "required": ["data"],
    }
