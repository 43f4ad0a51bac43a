"""A stand-in for what `serve-app top` reads: the service's live view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .fake_service import FakeService
from .local_http import Answer

ACCOUNT = "acct_0123456789abcdef01234567"
LOAD = {
    "replicas": 1, "running": 12, "waiting": 3, "queue_age_s": 0.4, "kv_used": 0.45, "queued_prefill_tokens": 2310,
    "tokens_per_s": 1840.5, "pressure": 1.53, "effective_share": 0.53,
}  # fmt: skip
LIVE: dict[str, Any] = {
    "at": "2026-11-23T06:00:01.123Z",
    "currency": "USD",
    "open_requests": 15,
    "held": "0.0123",
    "limiters": [
        {"shard": 0, "admits": True, "open_requests": 15, "held": "0.0123"},
        {"shard": 1, "admits": None, "open_requests": 0, "held": "0.00"},
    ],
    "gateways": [
        {
            "holder": "gateway-1",
            "open_requests": 15,
            "spool": {"settlements": 1200, "bytes": 400_000, "age_s": 9.5, "ledger_away": True},
        },
        {"holder": "gateway-2", "open_requests": 0, "spool": None},
    ],
    "models": [
        {
            "id": "svc-chat",
            "backends": [
                {"name": "old", "weight": 75, "share": 0.75},
                {"name": "new", "weight": 25, "share": 0.25},
            ],
        },
        {"id": "svc-coder", "backends": [{"name": "old", "weight": 1, "share": 1.0}]},
    ],
    "backends": [
        {"name": "old", "status": "RUNNING", "replicas": 2, "load": LOAD},
        {"name": "new", "status": "DEPLOYING", "replicas": 0, "load": None},
    ],
    "accounts": [
        {
            "id": ACCOUNT, "name": "My team", "open_requests": 9, "held": "0.0101", "tokens_used": 12345,
            "tokens_limit": 10**6, "effective_share": 0.53,
        }
    ],
}  # fmt: skip


class LiveService(FakeService):
    """The service's stand-in, whose live view is `live`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LIVE

    def routes(self) -> list[tuple[str, str, Callable[..., Answer]]]:
        return [*super().routes(), ("GET", "/admin/live", lambda request: Answer(200, self.live))]
