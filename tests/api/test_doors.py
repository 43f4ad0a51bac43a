"""Ids of requests say which door they came through, and no two doors share a path or a prefix."""

from __future__ import annotations

import pytest

from serve_app.api.door import Door
from serve_app.api.doors import DOORS, door_of


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
def test_an_id_belongs_to_its_door_alone(door: Door) -> None:
    assert door_of(f"{door.id_prefix}{'0' * 32}") is door
    assert [other.path for other in DOORS if other.path == door.path] == [door.path]


def test_another_id_belongs_to_no_door() -> None:
    assert door_of("0" * 32) is None
    assert door_of("req_1") is None
