"""Lists the doors of the gateway: the endpoints of its wire formats.

Routes, HAProxy's rules and the lookup of request ids use these tables.
"""

from __future__ import annotations

from typing import Final

from serve_app.api.chat_door import ChatDoor
from serve_app.api.completions_door import CompletionsDoor
from serve_app.api.door import Door
from serve_app.api.messages_door import CountTokensDoor, MessagesDoor
from serve_app.api.responses_door import InputTokensDoor, ResponsesDoor
from serve_app.api.token_door import TokenDoor
from serve_app.api.tokenize_door import DetokenizeDoor, TokenizeDoor

DOORS: Final[tuple[Door, ...]] = (ChatDoor(), MessagesDoor(), ResponsesDoor(), CompletionsDoor())
TOKEN_DOORS: Final[tuple[TokenDoor, ...]] = (TokenizeDoor(), DetokenizeDoor(), CountTokensDoor(), InputTokensDoor())
MESSAGES_PATHS: Final = frozenset(
    prefix + path for prefix in ("", "/v1") for path in ("/messages", "/messages/count_tokens")
)
"""Paths whose clients read the request id from the header `request-id` too."""


def door_at(path: str) -> Door | TokenDoor | None:
    """Returns the door at a path, with or without `/v1`."""
    doors: tuple[Door | TokenDoor, ...] = (*DOORS, *TOKEN_DOORS)
    return next((door for door in doors if path in (door.path, f"/v1{door.path}")), None)


def door_of(request_id: str) -> Door | None:
    """Returns the door of the request with this id; None for an id of another form."""
    return next((door for door in DOORS if request_id.startswith(door.id_prefix)), None)
