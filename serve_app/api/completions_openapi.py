"""Builds the OpenAPI schema of a completion request from the declarations of its fields."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.api.chat_openapi import Schema, chat_request_schemas, object_schema
from serve_app.api.completions_request import SHARED, CompletionFields


def completion_request_schemas(identifiers: Sequence[str], most_output: int) -> dict[str, Schema]:
    """Returns a dict with one schema, `CompletionRequest`, which refers to schemas of the chat format."""
    chat = chat_request_schemas(identifiers, most_output)["ChatCompletionRequest"]
    body = object_schema(CompletionFields.model_json_schema(), null_is_absent=True)
    fields = body["properties"]
    fields["model"]["enum"] = list(identifiers)
    body["properties"] = {**fields, **{name: chat["properties"][name] for name in SHARED}}
    rules = [rule for rule in chat["allOf"] if rule["anyOf"][0]["properties"].keys() <= set(SHARED)]
    return {"CompletionRequest": {**body, "allOf": rules}}
