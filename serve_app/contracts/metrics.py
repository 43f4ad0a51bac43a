"""Every metric, declared once. Never an account or a key as a label, and nothing is billed from metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# The codes of a refused chat request (docs/api.md), and the statuses of all answers; 499: the client went away.
REFUSAL_CODES: Final = (
    "body_timeout", "budget_exceeded", "concurrency", "context_length_exceeded", "idempotency_in_progress",
    "idempotency_key_reused", "insufficient_balance", "invalid_api_key", "invalid_format", "invalid_parameter",
    "model_not_found", "overloaded_error", "requests", "server_error", "tokens", "wrong_keys",
)  # fmt: skip
STATUSES: Final = ("200", "400", "401", "402", "408", "409", "422", "429", "499", "500", "503")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Its exported name has the prefix `ray_`, and the suffix `_total` if it is a counter."""

    kind: Literal["counter", "histogram", "gauge"]
    name: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS  # upper bounds; of a histogram alone
    # Values of a counter's only label that are exported as 0 from the start: `increase` does not see a counter that
    # begins with its first event.
    known: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # looked up several times in each request


# Of gateways. The label `model` is the identifier that clients name.
REQUESTS: Final = Metric("counter", "serve_app_requests", "Chat requests answered", ("model", "status"))
REFUSALS: Final = Metric(
    "counter", "serve_app_refusals", "Chat requests refused, by error code", ("reason",), known=REFUSAL_CODES
)
REQUEST_SECONDS: Final = Metric("histogram", "serve_app_request_seconds", "Whole request", ("model",))
FIRST_TOKEN_SECONDS: Final = Metric("histogram", "serve_app_ttft_seconds", "Request to first token", ("model",))
PROMPT_TOKENS: Final = Metric("counter", "serve_app_prompt_tokens", "Prompt tokens billed", ("model",))
CACHED_TOKENS: Final = Metric(
    "counter", "serve_app_cached_tokens", "Prompt tokens of these taken from the cache", ("model",)
)
COMPLETION_TOKENS: Final = Metric("counter", "serve_app_completion_tokens", "Tokens of output billed", ("model",))
SETTLEMENTS: Final = Metric(
    "counter",
    "serve_app_settlements",
    "Settlements, by outcome",
    ("outcome",),
    known=("completed", "cancelled", "failed", "spooled", "rejected"),
)
SETTLEMENT_SECONDS: Final = Metric("histogram", "serve_app_settlement_seconds", "Usage to durable")

# Of gateways, and of model replicas, by `holder`: "gateway", "replica".
SPOOL_SETTLEMENTS: Final = Metric("gauge", "serve_app_spool_settlements", "Settlements in the spool", ("holder",))
SPOOL_BYTES: Final = Metric("gauge", "serve_app_spool_bytes", "Size of the spool", ("holder",))
SPOOL_AGE: Final = Metric(
    "gauge", "serve_app_spool_age_seconds", "Since the end of the request that waits longest in the spool", ("holder",)
)

# Of limiters. Totals are gauges that count from the start of the process: a counter that is born with its first event
# hides that event.
LIMITER_EPOCH: Final = Metric("gauge", "serve_app_limiter_epoch", "Epoch under which it admits, 0: none", ("shard",))
FEED_AGE_SECONDS: Final = Metric(
    "gauge", "serve_app_limiter_feed_age_seconds", "Since keys were last confirmed", ("shard",)
)
EXPIRED_HOLDS: Final = Metric(
    "gauge", "serve_app_limiter_expired_holds", "Holds whose gateway fell silent, since the start", ("shard",)
)

# Of accounting.
STUCK: Final = Metric("gauge", "serve_app_stuck_settlements", "Settlements that the ledger keeps and could not settle")
UNCOLLECTED: Final = Metric("counter", "serve_app_uncollected", "Charges that no balance covered, in units of currency")

# Of model replicas.
RUNNING: Final = Metric("gauge", "serve_app_running_sequences", "Sequences in the running batch")
WAITING: Final = Metric("gauge", "serve_app_waiting_sequences", "Sequences waiting for a place")
KV_BLOCKS_USED: Final = Metric("gauge", "serve_app_kv_blocks_used", "KV blocks in use")
LOAD_SECONDS: Final = Metric("gauge", "serve_app_load_seconds", "What the engine took to start, weights included")
KV_BLOCKS_TOTAL: Final = Metric("gauge", "serve_app_kv_blocks_total", "KV blocks there are")


class Metrics(Protocol):
    """Where values go. `labels` are values in the order of the metric's labels."""

    def add(self, counter: Metric, value: float, *labels: str) -> None:
        """`value` is above 0."""

    def observe(self, histogram: Metric, value: float, *labels: str) -> None: ...

    def set(self, gauge: Metric, value: float, *labels: str) -> None: ...
