"""Declares every metric once. `docs/metrics.md` is generated from here; dashboards and rules are checked against it.

No metric has an account or a key as a label, and billing does not use metrics.
"""

from __future__ import annotations

from typing import Final

from serve_app.contracts.metric import Metric

# Error codes of a refused chat request (docs/api.md), and the statuses of all answers; 499: the client hung up.
REFUSAL_CODES: Final = (
    "address_not_allowed", "body_timeout", "budget_exceeded", "concurrency", "context_length_exceeded",
    "idempotency_in_progress", "idempotency_key_reused", "insufficient_balance", "invalid_api_key",
    "invalid_format", "invalid_parameter", "model_not_found", "overloaded_error", "requests", "server_error",
    "tokens", "wrong_keys",
)  # fmt: skip
STATUSES: Final = ("200", "400", "401", "402", "403", "408", "409", "422", "429", "499", "500", "503")
# Refusals that more capacity or higher limits would have avoided.
DEMAND_CODES: Final = ("concurrency", "overloaded_error", "requests", "tokens")
NONE: Final = "none"  # `model` and `backend` of a request that is refused before they are known
LENGTHS: Final = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STEPS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)

# Gateways. `model` is the identifier that clients name, `backend` the application that serves it.
REQUESTS: Final = Metric(
    "counter", "serve_app_requests", "requests", "Requests for replies in any format, by status",
    ("model", "backend", "status"), known={"status": STATUSES},
)  # fmt: skip
DOOR_REQUESTS: Final = Metric(
    "counter", "serve_app_door_requests", "requests",
    "Requests answered, by path, such as `/chat/completions`; also those that only count tokens", ("door",),
)  # fmt: skip
REFUSALS: Final = Metric(
    "counter", "serve_app_refusals", "requests", "Requests for replies that were refused or failed, by error code",
    ("model", "reason"), known={"reason": REFUSAL_CODES},
)  # fmt: skip
REJECTED_DEMAND: Final = Metric(
    "counter", "serve_app_rejected_demand_tokens", "tokens",
    "Prompt tokens and requested output tokens of refused requests",
    ("model", "backend", "reason"), known={"reason": DEMAND_CODES},
)  # fmt: skip
REQUEST_SECONDS: Final = Metric(
    "histogram",
    "serve_app_request_seconds",
    "seconds",
    "Duration of a request, including refused ones",
    ("model", "backend"),
)
FIRST_TOKEN_SECONDS: Final = Metric(
    "histogram", "serve_app_ttft_seconds", "seconds", "Time from the request to its first token", ("model", "backend")
)
OUTPUT_TOKEN_SECONDS: Final = Metric(
    "histogram", "serve_app_time_per_output_token_seconds", "seconds",
    "Mean time between the tokens of one reply", ("model", "backend"), STEPS,
)  # fmt: skip
INTER_TOKEN_SECONDS: Final = Metric(
    "histogram", "serve_app_inter_token_seconds", "seconds",
    "Time between two pieces of a reply; with many streams, a piece may have several tokens", ("model", "backend"),
    STEPS,
)  # fmt: skip
PHASE_SECONDS: Final = Metric(
    "histogram", "serve_app_phase_seconds", "seconds",
    "Parts of a request: admit (limiter), queue, prefill and decode (replica)", ("model", "backend", "phase"),
    known={"phase": ("admit", "queue", "prefill", "decode")},
)  # fmt: skip
RERUNS: Final = Metric(
    "counter", "serve_app_reruns", "runs",
    "Times that a request ran again because a replica of this backend was lost", ("model", "backend"),
)  # fmt: skip
PROMPT_LENGTH: Final = Metric(
    "histogram", "serve_app_prompt_length_tokens", "tokens", "Prompt of a served request", ("model", "backend"), LENGTHS
)
REPLY_LENGTH: Final = Metric(
    "histogram", "serve_app_reply_length_tokens", "tokens", "Output of a served request", ("model", "backend"), LENGTHS
)
FINISHES: Final = Metric(
    "counter", "serve_app_finishes", "requests", "Requests that a replica started, by outcome",
    ("model", "backend", "reason"), known={"reason": ("stop", "length", "tool_calls", "cancelled", "failed")},
)  # fmt: skip
LATENCY_TARGETS: Final = Metric(
    "counter", "serve_app_latency_targets", "requests",
    "Served requests, by whether they met their identifier's targets; `all` is goodput",
    ("model", "backend", "target", "met"),
    known={"target": ("first_token", "output_token", "all"), "met": ("yes", "no")},
)  # fmt: skip
PROMPT_TOKENS: Final = Metric(
    "counter",
    "serve_app_prompt_tokens",
    "tokens",
    "Prompt tokens of settled requests, as in the ledger",
    ("model", "backend"),
)
CACHED_TOKENS: Final = Metric(
    "counter",
    "serve_app_cached_tokens",
    "tokens",
    "Prompt tokens of settled requests that came from the cache",
    ("model", "backend"),
)
COMPLETION_TOKENS: Final = Metric(
    "counter",
    "serve_app_completion_tokens",
    "tokens",
    "Output tokens of settled requests, as in the ledger",
    ("model", "backend"),
)
BACKEND_WEIGHT: Final = Metric(
    "gauge", "serve_app_backend_weight", "share", "Share of an identifier's requests that the backend should get",
    ("model", "backend"),
)  # fmt: skip
BACKEND_EJECTED: Final = Metric(
    "gauge", "serve_app_backend_ejected", "backends",
    "1 while the backend is ejected, because requests failed or were late: it gets only probes, unless no other "
    "backend runs; else 0",
    ("model", "backend"),
)  # fmt: skip
BACKEND_EJECTIONS: Final = Metric(
    "counter", "serve_app_backend_ejections", "ejections", "Times that the backend was ejected", ("model", "backend")
)
SETTLEMENTS: Final = Metric(
    "counter", "serve_app_settlements", "settlements", "Settlements, by outcome",
    ("outcome",), known={"outcome": ("completed", "cancelled", "failed", "spooled", "rejected")},
)  # fmt: skip
SETTLEMENT_SECONDS: Final = Metric(
    "histogram", "serve_app_settlement_seconds", "seconds", "Time until usage is durable"
)

# Gateways and model replicas, by `holder`: "gateway", "replica".
SPOOL_SETTLEMENTS: Final = Metric(
    "gauge", "serve_app_spool_settlements", "settlements", "Settlements in the spool", ("holder",)
)
SPOOL_BYTES: Final = Metric("gauge", "serve_app_spool_bytes", "bytes", "Size of the spool", ("holder",))
SPOOL_AGE: Final = Metric(
    "gauge", "serve_app_spool_age_seconds", "seconds",
    "Time since the end of the oldest request in the spool", ("holder",),
)  # fmt: skip

# Limiters.
LIMITER_EPOCH: Final = Metric(
    "gauge", "serve_app_limiter_epoch", "epoch", "Epoch under which the shard admits; 0: it does not admit", ("shard",)
)
FEED_AGE_SECONDS: Final = Metric(
    "gauge",
    "serve_app_limiter_feed_age_seconds",
    "seconds",
    "Time since the ledger last confirmed the keys",
    ("shard",),
)
HOLDS: Final = Metric("gauge", "serve_app_limiter_holds", "requests", "Requests with money held", ("shard",))
HELD: Final = Metric("gauge", "serve_app_limiter_held", "units of currency", "Money held for open requests", ("shard",))
EXPIRED_HOLDS: Final = Metric(
    "counter",
    "serve_app_limiter_expired_holds",
    "holds",
    "Holds that expired because their gateway sent no heartbeats",
    ("shard",),
)
PRESSURE: Final = Metric(
    "gauge", "serve_app_limiter_pressure", "targets",
    "The larger of two ratios: a backend's queueing delay to its target, and the work in its queued prompts to its "
    "target; above 1, limits are lowered", ("shard", "backend"),
)  # fmt: skip
EFFECTIVE_SHARE: Final = Metric(
    "gauge", "serve_app_limiter_effective_share", "share",
    "Share of the default tokens per minute that may be used under the current pressure; 1: all", ("shard", "backend"),
)  # fmt: skip

# Accounting.
REVENUE: Final = Metric(
    "counter", "serve_app_revenue", "units of currency", "Amount taken from balances for settled usage", ("model",)
)
UNCOLLECTED: Final = Metric("counter", "serve_app_uncollected", "units of currency", "Charges that no balance covered")
LEDGER_LAG: Final = Metric(
    "histogram", "serve_app_ledger_lag_seconds", "seconds", "Time from the end of a request to its commit in the ledger"
)
STUCK: Final = Metric(
    "gauge", "serve_app_stuck_settlements", "settlements", "Settlements that the ledger could not book"
)
BOOKS_DIFFERENCES: Final = Metric(
    "gauge", "serve_app_books_differences", "differences", "Differences found by the last check of the books"
)
BOOKS_CHECKED: Final = Metric(
    "gauge", "serve_app_books_checked_timestamp_seconds", "Unix seconds", "When the books were last checked"
)

# Model replicas: Ray's labels `application` (the backend) and `replica` tell them apart.
RUNNING: Final = Metric("gauge", "serve_app_running_sequences", "sequences", "Sequences in the running batch")
WAITING: Final = Metric("gauge", "serve_app_waiting_sequences", "sequences", "Sequences waiting for a place")
OLDEST_WAIT: Final = Metric(
    "gauge", "serve_app_oldest_wait_seconds", "seconds", "Age of the request that has waited longest for its first turn"
)
QUEUED_PREFILL: Final = Metric(
    "gauge", "serve_app_queued_prefill_tokens", "tokens", "Prompt tokens that wait or are being computed"
)
KV_BLOCKS_USED: Final = Metric("gauge", "serve_app_kv_blocks_used", "blocks", "KV blocks in use")
KV_BLOCKS_CACHED: Final = Metric(
    "gauge", "serve_app_kv_blocks_cached", "blocks", "Free KV blocks whose content can be reused"
)
KV_BLOCKS_TOTAL: Final = Metric("gauge", "serve_app_kv_blocks_total", "blocks", "All KV blocks")
ENGINE_STEPS: Final = Metric("counter", "serve_app_engine_steps", "steps", "Steps of the model")
ENGINE_STEP_SECONDS: Final = Metric("counter", "serve_app_engine_step_seconds", "seconds", "Time in steps")
ENGINE_STEP_ROWS: Final = Metric(
    "counter", "serve_app_engine_step_sequences", "sequences", "Sequences in steps; divided by steps: the mean batch"
)
ENGINE_PROMPT_TOKENS: Final = Metric(
    "counter", "serve_app_engine_prompt_tokens", "tokens", "Prompt tokens of started requests, including cached tokens"
)
ENGINE_OUTPUT_TOKENS: Final = Metric("counter", "serve_app_engine_output_tokens", "tokens", "Output tokens generated")
PREFIX_HITS: Final = Metric(
    "counter", "serve_app_engine_prefix_hit_tokens", "tokens", "Prompt tokens found in the prefix cache"
)
PREEMPTIONS: Final = Metric(
    "counter", "serve_app_engine_preemptions", "sequences", "Sequences preempted to free memory for another sequence"
)
DRAFTED: Final = Metric(
    "counter", "serve_app_engine_drafted_tokens", "tokens", "Guessed tokens that were verified, accepted or not"
)
ACCEPTED: Final = Metric("counter", "serve_app_engine_accepted_tokens", "tokens", "Guessed tokens that were accepted")
LOAD_SECONDS: Final = Metric(
    "gauge", "serve_app_load_seconds", "seconds", "Time to start the engine, including loading the weights"
)
REPLICA_COST: Final = Metric(
    "gauge", "serve_app_replica_cost_per_hour", "units of currency", "`cost_per_hour` of the backend's settings"
)

#: Metrics by the process that exports them.
OF_GATEWAYS: Final = (
    REQUESTS, DOOR_REQUESTS, REFUSALS, REJECTED_DEMAND, REQUEST_SECONDS, FIRST_TOKEN_SECONDS, OUTPUT_TOKEN_SECONDS,
    INTER_TOKEN_SECONDS, PHASE_SECONDS, PROMPT_LENGTH, REPLY_LENGTH, FINISHES, LATENCY_TARGETS, PROMPT_TOKENS,
    CACHED_TOKENS, COMPLETION_TOKENS, RERUNS, BACKEND_WEIGHT, BACKEND_EJECTED,
    BACKEND_EJECTIONS, SETTLEMENTS, SETTLEMENT_SECONDS,
)  # fmt: skip
OF_SPOOLS: Final = (SPOOL_SETTLEMENTS, SPOOL_BYTES, SPOOL_AGE)
OF_LIMITERS: Final = (LIMITER_EPOCH, FEED_AGE_SECONDS, HOLDS, HELD, EXPIRED_HOLDS, PRESSURE, EFFECTIVE_SHARE)
OF_ACCOUNTING: Final = (REVENUE, UNCOLLECTED, LEDGER_LAG, STUCK, BOOKS_DIFFERENCES, BOOKS_CHECKED)
OF_REPLICAS: Final = (
    RUNNING, WAITING, OLDEST_WAIT, QUEUED_PREFILL, KV_BLOCKS_USED, KV_BLOCKS_CACHED, KV_BLOCKS_TOTAL, ENGINE_STEPS,
    ENGINE_STEP_SECONDS, ENGINE_STEP_ROWS, ENGINE_PROMPT_TOKENS, ENGINE_OUTPUT_TOKENS, PREFIX_HITS, PREEMPTIONS,
    DRAFTED, ACCEPTED, LOAD_SECONDS, REPLICA_COST,
)  # fmt: skip
ALL: Final = (*OF_GATEWAYS, *OF_SPOOLS, *OF_LIMITERS, *OF_ACCOUNTING, *OF_REPLICAS)
