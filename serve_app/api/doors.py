"""Lists the doors that the gateway serves. Routes, HAProxy's rules and the lookup of request ids use this table."""

from __future__ import annotations

from typing import Final

from serve_app.api.chat_door import ChatDoor
from serve_app.api.door import Door
from serve_app.api.responses_door import ResponsesDoor

DOORS: Final[tuple[Door, ...]] = (ChatDoor(), ResponsesDoor())
