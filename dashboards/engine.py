"""Engine: how well do the replicas' steps, batches, caches and guesses work?"""

from __future__ import annotations

from typing import Final

from dashboards.layout import board
from dashboards.panels import Board, bad_from, graph, high_is_bad, low_is_bad, single
from dashboards.promql import NOW, REPLICA, SHOWN, increase_of, most, or_zero, rate_of, select, share, total
from serve_app.contracts import metrics

IDLE: Final = "idle"


def step_time(by: str, over: str) -> str:
    return share(rate_of(metrics.ENGINE_STEP_SECONDS, by, over=over), rate_of(metrics.ENGINE_STEPS, by, over=over))


def accepted(by: str, over: str) -> str:
    return share(rate_of(metrics.ACCEPTED, by, over=over), rate_of(metrics.DRAFTED, by, over=over))


NOW_ROW = [
    single(
        "How many replicas are stuck?",
        or_zero(
            f"count({select(metrics.RUNNING)} > 0 unless on ({REPLICA}) rate({select(metrics.ENGINE_STEPS)}[2m]) > 0)"
        ),
        "short", bad_from(1),
        good="0: every replica with sequences makes steps.",
        otherwise="A replica with sequences made no step for two minutes: check its log. Serve replaces it once its "
        "health check fails.",
        then=Board.CLUSTER,
    ),
    single(
        "How long does a step take?", step_time("", NOW), "s", high_is_bad(0.1, 0.25), empty=IDLE,
        good="Below 0.1 s on GPUs. A step gives each sequence of the batch a token.",
        otherwise="Large batches or prefills; if neither, the GPU is slow or shared.",
        then=Board.CLUSTER,
    ),
    single(
        "How often is a sequence preempted in an hour?", or_zero(increase_of(metrics.PREEMPTIONS, over="1h")),
        "short", high_is_bad(1, 100),
        good="Never: a preempted sequence is computed again.",
        otherwise="The KV cache is too small for the batch: lower max_running or raise kv_cache_memory.",
        then=Board.CAPACITY,
    ),
    single(
        "How full is the fullest KV cache?",
        f"max({share(total(metrics.KV_BLOCKS_USED, REPLICA), total(metrics.KV_BLOCKS_TOTAL, REPLICA))})",
        "percentunit", high_is_bad(0.85, 0.95), empty="no replica",
        good="Below 85%.",
        otherwise="Sequences wait for memory.",
        then=Board.CAPACITY,
    ),
    single(
        "What share of the guesses is right?", accepted("", NOW), "percentunit", low_is_bad(0.2, 0.4),
        empty="no guesses",
        good="Above 40%: guessing is worthwhile.",
        otherwise="The text is not repetitive. Guesses cost time in large batches: compare step times without them.",
        then=Board.USERS,
    ),
    single(
        "How long did the slowest replica load?", most(metrics.LOAD_SECONDS), "s", high_is_bad(120, 600),
        empty="no replica",
        good="Below two minutes: the autoscaler can follow the load.",
        otherwise="Fetch models ahead, and keep prepared weights on a shared volume (docs/guides/add-a-model.md).",
        then=Board.CAPACITY,
    ),
]  # fmt: skip

STEPS = [
    graph(
        "How does step time change?", {"{{application}} {{replica}}": step_time(REPLICA, SHOWN)}, "s",
        good="It follows the batch size, similar on all replicas of a backend.",
        otherwise="Only one replica: check its node.",
        then=Board.CLUSTER,
    ),
    graph(
        "How large is the batch?",
        {
            "{{application}} {{replica}}": share(
                rate_of(metrics.ENGINE_STEP_ROWS, REPLICA), rate_of(metrics.ENGINE_STEPS, REPLICA)
            )
        },
        "short",
        good="Sequences per step: large under load, which makes tokens cheap.",
        otherwise="Small while sequences wait: the KV cache is full, or max_running is low.",
        then=Board.CAPACITY,
    ),
    graph(
        "What share of time do engines compute?",
        {"{{application}} {{replica}}": rate_of(metrics.ENGINE_STEP_SECONDS, REPLICA)}, "percentunit",
        good="Near 100% while sequences run, 0 when idle.",
        otherwise="Clearly below it while sequences run: the process is short of CPU, or its event loop is blocked.",
        then=Board.CLUSTER,
    ),
]  # fmt: skip

TOKENS = [
    graph(
        "How many prompt tokens are processed per second?",
        {"{{application}}": rate_of(metrics.ENGINE_PROMPT_TOKENS, "application")}, "short",
        good="It follows the requests; cached tokens are included.",
        otherwise="Flat while prefill is queued: this is the replicas' maximum.",
        then=Board.CAPACITY,
    ),
    graph(
        "How many output tokens are generated per second?",
        {"{{application}}": rate_of(metrics.ENGINE_OUTPUT_TOKENS, "application")}, "short",
        good="It follows the sequences that run.",
        otherwise="It falls while sequences run: steps have become slower.",
        then=Board.USERS,
    ),
    graph(
        "What share of the prompts is in the prefix cache?",
        {
            "{{application}}": share(
                rate_of(metrics.PREFIX_HITS, "application"), rate_of(metrics.ENGINE_PROMPT_TOKENS, "application")
            )
        },
        "percentunit",
        good="High where conversations go on or share a system prompt.",
        otherwise="It falls when replicas are added, and when the KV cache has no room for old blocks.",
        then=Board.CAPACITY,
    ),
    graph(
        "Does guessing tokens pay?",
        {
            "{{application}} share that is right": accepted("application", SHOWN),
            "{{application}} guesses for each token": share(
                rate_of(metrics.DRAFTED, "application"), rate_of(metrics.ENGINE_OUTPUT_TOKENS, "application")
            ),
        },
        "percentunit",
        good="Many of the guesses are right: above 40%.",
        otherwise="Few are right: guessing only adds work.",
        then=Board.USERS,
    ),
]  # fmt: skip

MEMORY = [
    graph(
        "What are KV blocks used for?",
        {
            "{{application}} in use": total(metrics.KV_BLOCKS_USED, "application"),
            "{{application}} free, cached": total(metrics.KV_BLOCKS_CACHED, "application"),
            "{{application}} free, empty": f"{total(metrics.KV_BLOCKS_TOTAL, 'application')}"
            f" - {total(metrics.KV_BLOCKS_USED, 'application')} - {total(metrics.KV_BLOCKS_CACHED, 'application')}",
        },
        "short", stacked=True,
        good="Few blocks are empty: the rest serves as prefix cache.",
        otherwise="All are in use: sequences are preempted or wait.",
        then=Board.CAPACITY,
    ),
    graph(
        "Which backends preempt sequences?",
        {"{{application}} {{replica}}": rate_of(metrics.PREEMPTIONS, REPLICA)}, "ops",
        good="None.",
        otherwise="Their KV cache is too small for their batch.",
        then=Board.CAPACITY,
    ),
    graph(
        "What runs and waits on each replica?",
        {
            "{{replica}} running": total(metrics.RUNNING, "replica"),
            "{{replica}} waiting": total(metrics.WAITING, "replica"),
        },
        "short",
        good="Similar on all replicas of a backend.",
        otherwise="One has all the load: check how calls are routed.",
        then=Board.CAPACITY,
    ),
    graph(
        "How long do replicas load?", {"{{application}} {{replica}}": most(metrics.LOAD_SECONDS, REPLICA)}, "s",
        good="The same for all replicas of a backend, and less for those that find prepared weights.",
        otherwise="Slow disk or network on that node.",
        then=Board.CLUSTER,
    ),
]  # fmt: skip

BOARD: Final = board(
    Board.ENGINE,
    "How well do the replicas' steps, batches, caches and guesses work?",
    ("backend",),
    {"Now": NOW_ROW, "Steps": STEPS, "Tokens": TOKENS, "Memory and start": MEMORY},
)
