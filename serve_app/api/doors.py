"""Lists the doors that the gateway serves. Routes, HAProxy's rules and the lookup of request ids use this table."""

from __future__ import annotations

from typing import Final

from serve_app.api.chat_door import ChatDoor
from serve_app.api.door import Door

DOORS: Final[tuple[Door, ...]] = (ChatDoor(),)


def door_of(request_id: str) -> Door | None:
    """Returns the door of the request with this id; None for an id of another form."""
    return next((door for door in DOORS if request_id.startswith(door.id_prefix)), None)
