"""Valid bodies to start from, and short ways to parse and to be refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.chat_request import ChatRequest, parse_chat_request
from serve_app.api.errors import ApiError

SERVED = {"svc-chat": (32768, 4096), "svc-coder": (32768, 4096)}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "svc-chat", "messages": [{"role": "user", "content": "Hello"}], **more}


def parse(**more: Any) -> ChatRequest:
    return parse_chat_request(json.dumps(body(**more)).encode(), SERVED)


def refused(raw: bytes | None = None, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat_request(json.dumps(body(**more)).encode() if raw is None else raw, SERVED)
    error = caught.value
    assert error.message == error.body()["error"]["message"] != ""
    return error
