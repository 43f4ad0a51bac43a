"""Stand-ins for what `serve-app top` reads: the service's live view, exporters of its machines, and a Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from serve_app.contracts import metrics

from .fake_service import FakeService
from .local_http import Answer, LocalServer, Request

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


class Counts:
    """What a gateway has counted, as its machine's exporter writes it."""

    def __init__(self, worker: str = "w1") -> None:
        self.worker = worker
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        key = name, tuple({**labels, "WorkerId": self.worker}.items())
        self.values[key] = self.values.get(key, 0) + value

    def serve(self, seconds: float, *, backend: str = "old", prompt: int = 100, output: int = 10) -> None:
        """A request whose first token came after so long."""
        served = {"model": "svc-chat", "backend": backend}
        self.add(metrics.REQUESTS.exported, 1, **served, status="200")
        self.add(metrics.PROMPT_TOKENS.exported, prompt, **served)
        self.add(metrics.COMPLETION_TOKENS.exported, output, **served)
        first = metrics.FIRST_TOKEN_SECONDS
        for bound in (*first.buckets, inf):
            le = "+Inf" if bound == inf else str(float(bound))
            self.add(f"{first.exported}_bucket", float(seconds <= bound), **served, le=le)

    def refuse(self, reason: str, backend: str = "none") -> None:
        self.add(metrics.REQUESTS.exported, 1, model="svc-chat", backend=backend, status="429")
        self.add(metrics.REFUSALS.exported, 1, model="svc-chat", reason=reason)

    def text(self) -> str:
        lines = [
            "# HELP ray_tasks Of Ray itself, which nobody asks for here",
            "# TYPE ray_tasks gauge",
            'ray_tasks{Name="a } { b",State="RUNNING"} 1.0',
        ]
        for (name, labels), value in self.values.items():
            written = ",".join(f'{label}="{text}"' for label, text in labels)
            lines.append(f"{name}{{{written}}} {value:.1f}")
        return "\n".join(lines) + "\n"


class FakeExporter(LocalServer):
    """Exports what `counts` hold."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def handle(self, request: Request) -> Answer:
        if request.path != "/metrics":
            return Answer(404, "no such page")
        return Answer(200, self.counts.text(), {"content-type": "text/plain; version=0.0.4"})


class FakePrometheus(LocalServer):
    """Answers each query with the rows that `rows` has for a series that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[tuple[dict[str, str], float]]] = {}

    @property
    def queries(self) -> list[str]:
        return [request.query["query"] for request in self.requests]

    def handle(self, request: Request) -> Answer:
        rows = next((rows for name, rows in self.rows.items() if name in request.query["query"]), [])
        result = [{"metric": labels, "value": [1767225600.0, str(rate)]} for labels, rate in rows]
        return Answer(200, {"status": "success", "data": {"resultType": "vector", "result": result}})
