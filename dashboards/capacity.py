"""Capacity and autoscaling: is there enough, where does it go, and what does it cost?"""

from __future__ import annotations

from typing import Final

from dashboards.exported import CALLS_IN_PROGRESS, DESIRED_REPLICAS, QUEUED_CALLS, REPLICA_HEALTHY, TARGET_REPLICAS
from dashboards.layout import board
from dashboards.panels import Board, graph, high_is_bad, low_is_bad, single
from dashboards.promql import MODELS, NOW, REPLICA, VARIABLES, most, or_zero, rate_of, share, total
from serve_app.contracts import metrics

NO_REPLICA: Final = "no replica"
LACKING = 'reason="overloaded_error"'
# A backend's share is computed over all backends of its identifier, including those that are not shown.
OF_IDENTIFIER = 'backend!="none"'
SHOWN_BACKENDS = f'backend=~"{VARIABLES["backend"]}", {OF_IDENTIFIER}'


def actual_share() -> str:
    part = rate_of(metrics.REQUESTS, "model, backend", SHOWN_BACKENDS)
    return f"{part} / on (model) group_left () ({rate_of(metrics.REQUESTS, 'model', OF_IDENTIFIER)} > 0)"


NOW_ROW = [
    single(
        "Are all wanted replicas ready?",
        share(total(REPLICA_HEALTHY, where=MODELS), total(TARGET_REPLICAS, where=MODELS)),
        "percentunit", low_is_bad(0.5, 1), empty=NO_REPLICA,
        good="100%. Less for the minutes in which replicas start.",
        otherwise="Machines are missing, or replicas fail at the start: check the backend's log and pending pods.",
        then=Board.CLUSTER,
    ),
    single(
        "How many replicas does max_replicas deny?",
        or_zero(f"sum({most(DESIRED_REPLICAS, 'application', MODELS)} - {most(TARGET_REPLICAS, 'application', MODELS)}"
                " > 0)"),
        "short", high_is_bad(1, 2),
        good="0: the autoscaler gets what it asks for.",
        otherwise="Raise max_replicas of the backend, or accept that limits fall under pressure.",
        then=Board.USERS,
    ),
    single(
        "How long has the oldest request waited?", most(metrics.OLDEST_WAIT), "s", high_is_bad(1, 5), empty=NO_REPLICA,
        good="Below a second: a request gets its first turn at once.",
        otherwise="Replicas are too few, or one of them is stuck: compare them in 'Who waits longest?'.",
        then=Board.ENGINE,
    ),
    single(
        "How full is the fullest KV cache?",
        f"max({share(total(metrics.KV_BLOCKS_USED, REPLICA), total(metrics.KV_BLOCKS_TOTAL, REPLICA))})",
        "percentunit", high_is_bad(0.85, 0.95), empty=NO_REPLICA,
        good="Below 85%.",
        otherwise="Sequences wait for memory or are preempted: add replicas or raise kv_cache_memory.",
        then=Board.ENGINE,
    ),
    single(
        "How many tokens a second find no capacity?",
        or_zero(rate_of(metrics.REJECTED_DEMAND, where=LACKING, over=NOW)), "short", high_is_bad(1, 1000),
        good="0.",
        otherwise="This is demand that more replicas would serve.",
        then=Board.USERS,
    ),
    single(
        "How long is the longest queue?", most(metrics.WAITING), "short", high_is_bad(16, 48), empty=NO_REPLICA,
        good="A handful of sequences.",
        otherwise="At max_waiting a replica refuses requests.",
        then=Board.ENGINE,
    ),
]  # fmt: skip

REPLICAS = [
    graph(
        "Does the autoscaler get its replicas?",
        {
            "{{application}} healthy": total(REPLICA_HEALTHY, "application", MODELS),
            "{{application}} target": most(TARGET_REPLICAS, "application", MODELS),
            "{{application}} desired": most(DESIRED_REPLICAS, "application", MODELS),
        },
        "short",
        good="Healthy follows target within the time that a replica takes to load; desired lies between min and max.",
        otherwise="Healthy below target: machines are missing. Desired above target: max_replicas is reached.",
        then=Board.CLUSTER,
    ),
    graph(
        "What do the backends cost an hour?", {"{{application}}": total(metrics.REPLICA_COST, "application")}, "short",
        stacked=True,
        good="Units of currency, cost_per_hour times replicas: it falls when load does.",
        otherwise="It stays high without load: check min_replicas and down_after_s.",
        then=Board.MONEY,
    ),
    graph(
        "How many calls does each backend have?",
        {
            "{{application}} in replicas": total(CALLS_IN_PROGRESS, "application", MODELS),
            "{{application}} before replicas": total(QUEUED_CALLS, "application", MODELS),
        },
        "short",
        good="None wait before replicas for longer than a moment.",
        otherwise="Calls before replicas: all replicas are at max_ongoing_requests.",
        then=Board.CLUSTER,
    ),
]  # fmt: skip

QUEUE = [
    graph(
        "Who waits longest?", {"{{application}} {{replica}}": most(metrics.OLDEST_WAIT, REPLICA)}, "s",
        good="Near 0 on every replica.",
        otherwise="All rise: capacity. One rises: that replica is slow or stuck.",
        then=Board.ENGINE,
    ),
    graph(
        "How many run, and how many wait?",
        {
            "{{application}} running": total(metrics.RUNNING, "application"),
            "{{application}} waiting": total(metrics.WAITING, "application"),
        },
        "short",
        good="Running follows the load, waiting is near 0.",
        otherwise="Waiting rises while running does not: the batch is full, or the KV cache is.",
        then=Board.ENGINE,
    ),
    graph(
        "How much prefill is queued?", {"{{application}}": total(metrics.QUEUED_PREFILL, "application")}, "short",
        good="Tokens: below a second's worth of prefill for each replica.",
        otherwise="Prompts arrive faster than they are computed: first tokens will be late.",
        then=Board.USERS,
    ),
]  # fmt: skip

DEMAND = [
    graph(
        "How much demand is turned away, and why?",
        {"{{backend}} {{reason}}": rate_of(metrics.REJECTED_DEMAND, "backend, reason")}, "short",
        good="Tokens a second: none for overloaded_error.",
        otherwise="overloaded_error: add replicas; tokens: too, under pressure. The rest are limits.",
        then=Board.MONEY,
    ),
    graph(
        "How full are the KV caches?",
        {
            "{{application}} {{replica}}": share(
                total(metrics.KV_BLOCKS_USED, REPLICA), total(metrics.KV_BLOCKS_TOTAL, REPLICA)
            )
        },
        "percentunit",
        good="Below 85%, and similar on all replicas of a backend.",
        otherwise="They differ: requests are routed unevenly. All full: add replicas.",
        then=Board.ENGINE,
    ),
    graph(
        "Does traffic follow the weights?",
        {
            "{{model}} to {{backend}}, weight": most(metrics.BACKEND_WEIGHT, "model, backend"),
            "{{model}} to {{backend}}, requests": actual_share(),
        },
        "percentunit",
        good="The two lines of each backend coincide, after a change within a minute.",
        otherwise="Clients wait on a backend that is full, or gateways have not read the new weights.",
        then=Board.USERS,
    ),
    graph(
        "Is a backend ejected?",
        {"{{model}}: {{backend}}": most(metrics.BACKEND_EJECTED, "model, backend")}, "short",
        good="0: every backend with weight gets its share.",
        otherwise="1: its requests fail or are late, and others take its share. A roll-out was rolled back.",
        then=Board.USERS,
    ),
]  # fmt: skip

BOARD: Final = board(
    Board.CAPACITY,
    "Is there enough, where does it go, and what does it cost?",
    ("identifier", "backend"),
    {"Now": NOW_ROW, "Replicas": REPLICAS, "Queue": QUEUE, "Demand": DEMAND},
)
