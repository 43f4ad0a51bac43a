"""The form of every refusal of the service."""

from __future__ import annotations

import httpx


def refused(answer: httpx.Response, status: int, says: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert says in answer.json()["error"]["message"]
