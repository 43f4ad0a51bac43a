"""Describes POST /tokenize and /detokenize for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from serve_app.admin import responses
from serve_app.admin.values import Schema
from serve_app.api.chat_openapi import REF
from serve_app.api.tokenize_door import tokenize_schemas

Count = Annotated[int, Field(ge=0)]
_ERRORS: Final = (400, 401, 403, 408, 422, 429, 500, 503)
_FREE: Final = (
    "Free of charge: nothing is billed, and no balance is needed. The rate is ten times that of other queries; each "
    "further 16 KiB of a body count as one more request. At most four requests of an account run at the same time."
)


class Tokens(BaseModel):
    """The tokens of a prompt."""

    count: Count = Field(description="Number of tokens.", examples=[2])
    max_model_len: int = Field(
        ge=1, description="Maximum number of tokens of prompt and reply together.", examples=[32_768]
    )
    tokens: list[Count] = Field(description="Token ids.", examples=[[19556, 28]])
    token_strs: list[str] | None = Field(
        description="Names of the tokens; null unless the request asks for them.", examples=[None]
    )


class TokenText(BaseModel):
    """The text of tokens."""

    prompt: str = Field(examples=["Hello,"])


REPLIES: Final = (Tokens, TokenText)


def paths() -> dict[str, Schema]:
    """Returns the operations by path."""
    tokenize = (
        f"{_FREE}\n\nRules that the schema does not express: those of the same fields in a chat request, and "
        "`add_generation_prompt: false` is not possible with `prefix`."
    )
    return {
        "/tokenize": {
            "post": _operation(
                "tokenize",
                "Convert a text or a conversation to tokens",
                tokenize,
                {"model": "svc-chat", "prompt": "Hello,"},
                responses.json_response("The tokens and their number.", "Tokens"),
            )
        },
        "/detokenize": {
            "post": _operation(
                "detokenize",
                "Convert tokens to text",
                _FREE,
                {"model": "svc-chat", "tokens": [19556, 28]},
                responses.json_response("The text.", "TokenText"),
            )
        },
    }


def schemas(chat: Schema, identifiers: Sequence[str]) -> dict[str, Schema]:
    """Returns the schemas of the bodies by name. `chat` is the schema of a chat request."""
    return tokenize_schemas(chat, identifiers)


def _operation(name: str, summary: str, description: str, example: Schema, reply: Schema) -> Schema:
    body: dict[str, Any] = {
        "schema": {"$ref": f"{REF}{name.capitalize()}Request"},
        "examples": {"text": {"summary": "A text", "value": example}},
    }
    return {
        "operationId": name,
        "tags": ["Tokens"],
        "summary": summary,
        "description": description,
        "security": [{"apiKey": []}],
        "parameters": responses.parameters("RequestId"),
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": reply, **responses.errors(*_ERRORS)},
    }
