"""The wire: what clients send and see. Pure functions around one protocol; knows no server, model or account."""

from serve_app.api import errors, headers
from serve_app.api.errors import ApiError
from serve_app.api.estimate import estimate_prompt_tokens
from serve_app.api.idempotency import fingerprint, idempotency_key
from serve_app.api.models import balance_body, model_body, model_list, usage_body
from serve_app.api.schema import MAX_BODY_BYTES, ChatRequest, ServedModels, parse_chat_request
from serve_app.api.stream import DONE, KEEP_ALIVE, LINE_FEED, Call, Choice, ChunkEncoder, Usage, complete_reply

__all__ = [
    "DONE",
    "KEEP_ALIVE",
    "LINE_FEED",
    "MAX_BODY_BYTES",
    "ApiError",
    "Call",
    "ChatRequest",
    "Choice",
    "ChunkEncoder",
    "ServedModels",
    "Usage",
    "balance_body",
    "complete_reply",
    "errors",
    "estimate_prompt_tokens",
    "fingerprint",
    "headers",
    "idempotency_key",
    "model_body",
    "model_list",
    "parse_chat_request",
    "usage_body",
]
