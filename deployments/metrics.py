"""Prometheus metrics through Ray's own. Never an account or a key as a label, and nothing is billed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.gathered import Gathered

if TYPE_CHECKING:
    from serve_app.engine import EngineStats

SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]


class GatewayMetrics:
    """What the gateway counts; see serve_app.gateway.ports.Metrics."""

    def __init__(self) -> None:
        self._gathered = Gathered()
        model = ("model",)
        self._requests = Counter("serve_app_requests", "Chat requests answered", ("model", "status"))
        self._refusals = Counter("serve_app_refusals", "Chat requests refused, by error code", ("reason",))
        self._request_seconds = Histogram("serve_app_request_seconds", "Whole request", SECONDS, model)
        self._first_token = Histogram("serve_app_ttft_seconds", "Request to first token", SECONDS, model)
        self._prompt = Counter("serve_app_prompt_tokens", "Prompt tokens billed", model)
        self._cached = Counter("serve_app_cached_tokens", "Prompt tokens of these taken from the cache", model)
        self._completion = Counter("serve_app_completion_tokens", "Tokens of output billed", model)
        self._settlement_seconds = Histogram("serve_app_settlement_seconds", "Usage to durable", SECONDS)
        self._settlements = Counter("serve_app_settlements", "Settlements, by outcome", ("outcome",))

    def request(self, model: str, status: int, seconds: float) -> None:
        """One request has been answered; 499 stands for a client that went away."""
        self._gathered.inc(self._requests, 1, ("model", model), ("status", str(status)))
        self._gathered.observe(self._request_seconds, seconds, ("model", model))

    def refusal(self, reason: str) -> None:
        """One request has been refused."""
        self._gathered.inc(self._refusals, 1, ("reason", reason))

    def first_token(self, model: str, seconds: float) -> None:
        """From the request's arrival to its first token."""
        self._gathered.observe(self._first_token, seconds, ("model", model))

    def tokens(self, model: str, prompt: int, cached: int, completion: int) -> None:
        """Tokens of one billed request."""
        for counter, count in ((self._prompt, prompt), (self._cached, cached), (self._completion, completion)):
            if count:
                self._gathered.inc(counter, count, ("model", model))

    def settlement(self, outcome: str, seconds: float) -> None:
        """One settlement has become durable, or was refused."""
        self._gathered.inc(self._settlements, 1, ("outcome", outcome))
        self._gathered.observe(self._settlement_seconds, seconds)

    def flush(self) -> None:
        """Hands Ray what it has not been told yet; it is told twice a second."""
        self._gathered.flush()


class EngineMetrics:
    """The engine's load, as gauges."""

    def __init__(self) -> None:
        self._running = Gauge("serve_app_running_sequences", "Sequences in the running batch")
        self._waiting = Gauge("serve_app_waiting_sequences", "Sequences waiting for a place")
        self._used = Gauge("serve_app_kv_blocks_used", "KV blocks in use")
        self._total = Gauge("serve_app_kv_blocks_total", "KV blocks there are")

    def report(self, stats: EngineStats) -> None:
        """Sets all gauges."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._used.set(stats.kv_blocks_used)
        self._total.set(stats.kv_blocks_total)
