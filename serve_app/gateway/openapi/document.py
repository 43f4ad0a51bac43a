"""The OpenAPI document, put together from the code that it describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app import __version__
from serve_app.gateway import admin_bodies
from serve_app.gateway.openapi import account_replies, admin_replies, chat_reply
from serve_app.gateway.openapi.admin_paths import admin_paths
from serve_app.gateway.openapi.chat_request import REF, chat_request_schemas
from serve_app.gateway.openapi.public_paths import public_paths
from serve_app.gateway.openapi.responses import HEADERS, PARAMETERS, error_responses, error_schemas
from serve_app.settings import IdentifierSettings

Schema = dict[str, Any]

_REPLIES: Final[tuple[type[BaseModel], ...]] = (
    chat_reply.ChatCompletion,
    chat_reply.ChatCompletionChunk,
    account_replies.Model,
    account_replies.ModelList,
    account_replies.Balance,
    account_replies.UsageList,
    account_replies.Health,
    account_replies.Ready,
    admin_replies.Account,
    admin_replies.AccountPage,
    admin_replies.NewKey,
    admin_replies.KeyList,
    admin_replies.GrantList,
    admin_replies.AdminUsage,
    admin_replies.RequestPage,
    admin_replies.AuditPage,
    admin_replies.LedgerCheck,
    admin_replies.AdminModelList,
)
_BODIES: Final[tuple[type[BaseModel], ...]] = (
    admin_bodies.CreateAccount,
    admin_bodies.Credit,
    admin_bodies.Correction,
    admin_bodies.TakeBack,
    admin_bodies.LimitChanges,
    admin_bodies.CreateKey,
    admin_bodies.KeyChanges,
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
    "Service": "Whether it runs. No key needed.",
    "Operator: Accounts": "With the operator's key: accounts, funds and limits.",
    "Operator: Keys": "With the operator's key: API keys.",
    "Operator: Usage": "With the operator's key: everybody's usage.",
    "Operator: Service": "With the operator's key: books, audit log and backends.",
}


def build_document(models: Mapping[str, IdentifierSettings]) -> Schema:
    """OpenAPI 3.1 of a service that serves `models`, as JSON values."""
    most_output = max((model.max_output for model in models.values()), default=1)
    return {
        "openapi": "3.1.0",
        "info": {"title": "serve-app", "version": __version__, "description": _ABOUT},
        "servers": [
            {"url": "/v1", "description": "As SDKs write it"},
            {"url": "/", "description": "The same, shorter"},
        ],
        "tags": [{"name": name, "description": description} for name, description in _TAGS.items()],
        "paths": {**public_paths(), **admin_paths()},
        "components": {
            "schemas": {
                **chat_request_schemas(tuple(models), most_output),
                **_event(),
                **_schemas(),
                **error_schemas(),
            },
            "responses": error_responses(),
            "headers": dict(HEADERS),
            "parameters": dict(PARAMETERS),
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer", "description": "An API key of your account."},
                "operatorKey": {"type": "http", "scheme": "bearer", "description": "The service's operator key."},
            },
        },
    }


def _event() -> dict[str, Schema]:
    """One event of a stream, modelled as OpenAPI 3.2 does it: its data is text that has JSON in it."""
    kinds = [{"$ref": f"{REF}ChatCompletionChunk"}, {"$ref": f"{REF}Error"}]
    told = {"title": "JSON", "contentMediaType": "application/json", "contentSchema": {"oneOf": kinds}}
    data = {"type": "string", "anyOf": [{"title": "The end", "const": "[DONE]"}, told]}
    return {
        "ChatCompletionEvent": {
            "description": "One event of a stream.",
            "type": "object",
            "properties": {"data": data},
            "required": ["data"],
        }
    }


def _schemas() -> dict[str, Schema]:
    """Replies as they are written, bodies of operators as they are read."""
    return _generated(_REPLIES, "serialization") | _generated(_BODIES, "validation")


def _generated(kinds: Iterable[type[BaseModel]], mode: Literal["serialization", "validation"]) -> dict[str, Schema]:
    _, generated = models_json_schema([(kind, mode) for kind in kinds], ref_template=REF + "{model}")
    return {name: _plain(schema, mode) for name, schema in generated["$defs"].items()}


def _plain(schema: Any, mode: str) -> Any:
    """Without titles that repeat names, and without defaults that no request has: null, and all of a reply."""
    if isinstance(schema, list):
        return [_plain(one, mode) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if not _is_noise(name, value, mode)}
    return {
        name: {field: _plain(one, mode) for field, one in value.items()}
        if name == "properties"
        else _plain(value, mode)
        for name, value in kept.items()
    }


def _is_noise(name: str, value: Any, mode: str) -> bool:
    if name == "default":
        return value is None or mode == "serialization"
    return name == "title" and isinstance(value, str)
