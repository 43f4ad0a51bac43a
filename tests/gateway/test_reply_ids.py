"""Ids of replies: unique, and in the order of their time, as the ledger's index of them wants."""

from __future__ import annotations

import re

import pytest

from serve_app.gateway import reply_endpoint


def test_ids_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_780_315_200 * 10**9
    made = []
    for _ in range(200):
        now += 10**6
        monkeypatch.setattr(reply_endpoint.time, "time_ns", lambda at=now: at)
        made.append(reply_endpoint.new_digits())
    assert sorted(made) == made
    assert len({reply_endpoint.new_digits() for _ in range(200)}) == 200
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in made)
