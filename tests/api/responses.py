"""Requests to POST /responses for the tests of this folder and of the gateway."""

from __future__ import annotations

import json
from typing import Any

from serve_app.api.errors import ApiError
from serve_app.api.responses_chat import ResponsesChat
from serve_app.api.responses_door import ResponsesDoor

SERVED = {"svc-chat": (32768, 4096)}
DOOR = ResponsesDoor()
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CUSTOM = {"type": "custom", "name": "patch", "description": "Applies a patch."}
NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [FUNCTION]}


def parsed(**fields: Any) -> ResponsesChat:
    body = {"model": "svc-chat", "input": "Hi", **fields}
    chat = DOOR.parse(json.dumps(body).encode(), SERVED, 10**6, 10**5)
    assert isinstance(chat, ResponsesChat)
    return chat


def refusal(**fields: Any) -> ApiError:
    try:
        parsed(**fields)
    except ApiError as error:
        return error
    raise AssertionError(f"accepted: {fields}")
