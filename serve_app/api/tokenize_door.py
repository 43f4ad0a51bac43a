"""The doors for POST /tokenize and /detokenize: the tokens of a prompt, and the text of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from serve_app.api import errors
from serve_app.api.chat_openapi import body_schemas
from serve_app.api.chat_request import ChatRequest, ServedModels, check_chat_request
from serve_app.api.codec import FirstFault, Shape, keywords, parse_object, typed
from serve_app.api.errors import ApiError
from serve_app.api.served_names import served_identifier
from serve_app.api.token_door import TokenQuery, conversation_call
from serve_app.api.tools_and_formats import invalid
from serve_app.contracts.generation import TokenizeCall, Tokenized

CONVERSATION: Final = ("messages", "tools", "tool_choice")
"""Fields of a chat request that POST /tokenize also has."""
_MAX_ID: Final = 2**31 - 1


class TokenizeRequest(Shape):
    """The body of POST /tokenize, apart from the fields of a conversation."""

    model: str
    """A model identifier from `/models`."""
    prompt: str | None = None
    """A text. The name of a special token in it is encoded as that token. Send either `prompt` or `messages`."""
    add_special_tokens: Annotated[bool | None, keywords(default=True)] = None
    """With `prompt`: include the special tokens that the model's tokenizer puts around a text."""
    add_generation_prompt: Annotated[bool | None, keywords(default=True)] = None
    """With `messages`: include the beginning of the assistant's turn. By default, `count` is the number of prompt
    tokens that a chat request with these messages is billed for."""
    return_token_strs: Annotated[bool | None, keywords(default=False)] = None
    """Return the tokens' names in the vocabulary as well."""


class DetokenizeRequest(Shape):
    """The body of POST /detokenize."""

    model: str
    """A model identifier from `/models`."""
    tokens: Annotated[
        list[Annotated[int, keywords(minimum=0, maximum=_MAX_ID)]],
        FirstFault(),
    ]
    """Token ids of the model's vocabulary. Any other id is an error."""


def tokenize_schemas(chat: Mapping[str, Any], identifiers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the schemas of the bodies by name. `chat` is the schema of a chat request."""
    schemas = {
        **body_schemas(TokenizeRequest, "TokenizeRequest", identifiers),
        **body_schemas(DetokenizeRequest, "DetokenizeRequest", identifiers),
    }
    body = schemas["TokenizeRequest"]
    for name in CONVERSATION:
        kinds = chat["properties"][name]
        body["properties"][name] = kinds if name != "messages" else {"anyOf": [kinds, {"type": "null"}]}
    absent = {"type": "null"}
    body["anyOf"] = [
        {
            "title": "a text",
            "properties": {"prompt": {"type": "string"}, **dict.fromkeys(CONVERSATION, absent)},
            "required": ["prompt"],
        },
        {
            "title": "a conversation",
            "properties": {
                "messages": {"type": "array"},
                "prompt": absent,
                "add_special_tokens": {"enum": [None, False]},
            },
            "required": ["messages"],
        },
    ]
    return schemas


class _ErrorsOfChat:
    def status(self, error: ApiError) -> int:
        return error.status

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body()


class TokenizeDoor(_ErrorsOfChat):
    """See `TokenDoor`."""

    path = "/tokenize"

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> TokenQuery:
        parsed = {name: value for name, value in parse_object(body, max_bytes, max_items).items() if value is not None}
        request = typed(TokenizeRequest, parsed)
        names = request.return_token_strs is True
        if request.prompt is None:
            if "messages" not in parsed:
                raise errors.invalid_format("prompt or messages is missing: one of them is required.", "prompt")
            fields: dict[str, Any] = {name: parsed[name] for name in ("model", *CONVERSATION) if name in parsed}
            chat: ChatRequest = check_chat_request(fields, served)
            if request.add_special_tokens:
                rule = "is only possible with prompt: the model's template has its own special tokens"
                raise invalid("add_special_tokens", rule)
            is_open = request.add_generation_prompt is not False
            if chat.continue_final and not is_open:
                raise invalid("add_generation_prompt", "can't be false together with prefix")
            return TokenQuery(chat.model, conversation_call(chat, add_generation_prompt=is_open, with_names=names))
        if "messages" in parsed:
            raise invalid("prompt", "is not possible together with messages: send one of them")
        for name in CONVERSATION:
            if name in parsed:
                raise invalid(name, "is only possible with messages")
        identifier = served_identifier(request.model, served)
        special = request.add_special_tokens is not False
        call = TokenizeCall("", text=request.prompt, add_special_tokens=special, with_names=names)
        return TokenQuery(identifier, call)

    def answer(self, query: TokenQuery, tokenized: Tokenized, context_length: int) -> dict[str, Any]:
        names = list(tokenized.names) if query.call.with_names else None
        return {
            "count": tokenized.count,
            "max_model_len": context_length,
            "tokens": list(tokenized.token_ids),
            "token_strs": names,
        }


class DetokenizeDoor(_ErrorsOfChat):
    """See `TokenDoor`."""

    path = "/detokenize"

    def parse(self, body: bytes, served: ServedModels, max_bytes: int, max_items: int) -> TokenQuery:
        parsed = {name: value for name, value in parse_object(body, max_bytes, max_items).items() if value is not None}
        request = typed(DetokenizeRequest, parsed)
        identifier = served_identifier(request.model, served)
        for at, token in enumerate(request.tokens):
            if not 0 <= token <= _MAX_ID:
                raise invalid(f"tokens[{at}]", f"must be from 0 to {_MAX_ID}")
        return TokenQuery(identifier, TokenizeCall("", token_ids=tuple(request.tokens)))

    def answer(self, query: TokenQuery, tokenized: Tokenized, context_length: int) -> dict[str, Any]:
        return {"prompt": tokenized.text}
