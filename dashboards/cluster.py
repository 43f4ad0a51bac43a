"""Cluster: are the nodes, the front door and Ray Serve well?"""

from __future__ import annotations

from typing import Final

from dashboards import exported
from dashboards.layout import board
from dashboards.panels import Board, graph, high_is_bad, low_is_bad, single
from dashboards.promql import NOW, most, or_zero, quantile, rate_of, select, share, total

STATUSES: Final = {
    0: "unknown", 1: "deploy failed", 2: "unhealthy", 3: "not started", 4: "deleting", 5: "deploying", 6: "running",
}  # fmt: skip
GATEWAYS: Final = 'deployment="Gateway"'
DEPLOYMENT: Final = "application, deployment"
DEPLOYMENT_LEGEND: Final = "{{application}} {{deployment}}"
MEMORY = share(total(exported.NODE_MEMORY_USED, "instance"), total(exported.NODE_MEMORY_TOTAL, "instance"))
CONNECTIONS = share(
    total(exported.HAPROXY_CONNECTIONS, "instance"), total(exported.HAPROXY_MAX_CONNECTIONS, "instance")
)


def gpu_memory() -> str:
    """Returns an expression for the used share of each GPU's memory."""
    gpu = "instance, GpuIndex"
    used, free = total(exported.GPU_MEMORY_USED, gpu), total(exported.GPU_MEMORY_FREE, gpu)
    return share(used, f"{used} + {free}")


def starts() -> str:
    """Returns an expression that counts the replicas started in the last hour: each has a separate, new series."""
    counters = select(exported.REPLICA_STARTS)
    seen, before = f"count_over_time({counters}[1h])", f"count_over_time({counters}[1h] offset 1h)"
    return f"count by ({DEPLOYMENT}) ({seen} unless {before})"


NOW_ROW = [
    single(
        "How many gateways are healthy?", or_zero(total(exported.REPLICA_HEALTHY, where=GATEWAYS)), "short",
        low_is_bad(1, 2),
        good="Two or more. On a single machine, one (shown yellow) is normal.",
        otherwise="0: no request is served. Run `serve-app doctor` against the service's address.",
        then=Board.USERS,
    ),
    single(
        "Does every application run?", f"min({select(exported.APPLICATION_STATUS)})", "short", low_is_bad(5, 6),
        names=STATUSES,
        good="running.",
        otherwise="`serve status` gives the reason. deploying: wait. deploy failed: the new version does not start.",
        then=Board.CAPACITY,
    ),
    single(
        "How busy is the busiest CPU?", most(exported.NODE_CPU), "percent", high_is_bad(80, 95),
        good="Below 80%.",
        otherwise="Event loops are delayed. Move replicas to other nodes, or give them fewer threads.",
        then=Board.ENGINE,
    ),
    single(
        "How full is the fullest memory?", f"max({MEMORY})", "percentunit", high_is_bad(0.8, 0.92),
        good="Below 80% of a node.",
        otherwise="At 95% Ray ends processes: lower kv_cache_memory on CPUs, or use larger nodes.",
        then=Board.CAPACITY,
    ),
    single(
        "How full is the fullest disk?", most(exported.NODE_DISK), "percent", high_is_bad(80, 90),
        good="Below 80%. Spools, logs and models are stored on it.",
        otherwise="Remove old models and logs. If a spool cannot be written, no requests are admitted.",
        then=Board.MONEY,
    ),
    single(
        "How near is HAProxy to its connection limit?", f"max({CONNECTIONS})", "percentunit", high_is_bad(0.7, 0.9),
        good="Below 70% of RAY_SERVE_HAPROXY_MAXCONN on every node.",
        otherwise="Add nodes, or raise RAY_SERVE_HAPROXY_MAXCONN. At the limit, new clients wait.",
        then=Board.USERS,
    ),
    single(
        "What share of HTTP requests fails?",
        share(
            or_zero(rate_of(exported.HTTP_ERRORS, where='error_code=~"5.."', over=NOW)),
            rate_of(exported.HTTP_REQUESTS, over=NOW),
        ),
        "percentunit", high_is_bad(0.001, 0.01), empty="no traffic",
        good="Below 0.1% answered with 5xx, health checks and operators' calls included.",
        otherwise="If 'User health' shows no errors, requests fail before they reach a gateway.",
        then=Board.USERS,
    ),
    single(
        "How late are event loops?", quantile(0.99, exported.EVENT_LOOP_DELAY, over=NOW), "ms", high_is_bad(50, 250),
        good="p99 below 50 ms.",
        otherwise="A process is short of CPU, or code blocks its loop: see which component.",
        then=Board.ENGINE,
    ),
]  # fmt: skip

NODES = [
    graph(
        "How busy are the CPUs?", {"{{instance}}": most(exported.NODE_CPU, "instance")}, "percent",
        good="Below 80% on every node.",
        otherwise="If only one node is busy, it has too many replicas.",
        then=Board.CAPACITY,
    ),
    graph(
        "How full is memory?", {"{{instance}}": MEMORY}, "percentunit",
        good="Flat, below 80%.",
        otherwise="It climbs for days: a process leaks. Ray's dashboard shows which.",
        then=Board.CAPACITY,
    ),
    graph(
        "How full are the disks?", {"{{instance}}": most(exported.NODE_DISK, "instance")}, "percent",
        good="Flat, below 80%.",
        otherwise="If it climbs during an outage of the ledger, spools grow. Otherwise, logs or models do.",
        then=Board.MONEY,
    ),
    graph(
        "How busy are the GPUs?", {"{{instance}} GPU {{GpuIndex}}": most(exported.GPU_USE, "instance, GpuIndex")},
        "percent",
        good="It follows the load.",
        otherwise="Idle while sequences run: the process that feeds it is short of CPU. A line that ends: the GPU is "
        "lost.",
        then=Board.ENGINE,
    ),
    graph(
        "How full is GPU memory?", {"{{instance}} GPU {{GpuIndex}}": gpu_memory()}, "percentunit",
        good="High and flat: weights and KV cache are taken at the start.",
        otherwise="It climbs: something else runs on the GPU, or steps need more than planned.",
        then=Board.ENGINE,
    ),
]  # fmt: skip

FRONT_DOOR = [
    graph(
        "What does Serve answer?", {"{{status_code}}": rate_of(exported.HTTP_REQUESTS, "status_code")}, "reqps",
        stacked=True,
        good="Nearly all 200. Health checks and operators' calls are included.",
        otherwise="Compare it with 'User health': the difference never reached a gateway's chat route.",
        then=Board.USERS,
    ),
    graph(
        "Which routes fail?",
        {"{{error_code}} {{route}}": rate_of(exported.HTTP_ERRORS, "error_code, route", 'error_code=~"5.."')}, "reqps",
        good="None.",
        otherwise="The route names the application; check its deployments' errors.",
        then=Board.USERS,
    ),
    graph(
        "What does HAProxy answer?",
        {"{{code}}": rate_of(exported.HAPROXY_RESPONSES, "code", 'proxy="http_frontend"')}, "reqps", stacked=True,
        good="Mostly 2xx, with a steady share of 4xx. A request in a lane counts twice.",
        otherwise="HAProxy itself sends 5xx that Serve does not show: no gateway is up, or an address has too many "
        "requests in its lane.",
        then=Board.MONEY,
    ),
    graph(
        "How many connections are open?",
        {
            "{{instance}}": total(exported.HAPROXY_CONNECTIONS, "instance"),
            "{{instance}} limit": total(exported.HAPROXY_MAX_CONNECTIONS, "instance"),
        },
        "short",
        good="Far below the limit, and similar on all nodes.",
        otherwise="They differ: the load balancer in front of them prefers a few nodes.",
        then=Board.USERS,
    ),
    graph(
        "How many requests does HAProxy slow down?",
        {
            "{{proxy}}": rate_of(exported.HAPROXY_BACKEND_REQUESTS, "proxy", 'proxy=~"lanes.*"'),
            "refused": rate_of(exported.HAPROXY_DENIED, where='proxy="http_frontend"'),
        },
        "reqps",
        good="0.",
        otherwise="Most requests of an address or key are refused: the log of requests shows which.",
        then=Board.USERS,
    ),
    graph(
        "How many requests wait in HAProxy?", {"{{proxy}}": total(exported.HAPROXY_QUEUE, "proxy")}, "short",
        good="0.",
        otherwise="Only lanes queue: a client sends many requests that are refused. Other clients are not affected.",
        then=Board.MONEY,
    ),
    graph(
        "Is HAProxy up to date?",
        {
            "{{node_id}} processes": total(exported.HAPROXY_PROCESSES, "node_id"),
            "{{node_id}} replicas out of sync": total(exported.HAPROXY_MISMATCH, "node_id"),
        },
        "short",
        good="One process per node. HAProxy and Serve know the same replicas, except for moments.",
        otherwise="More processes: old ones still have open streams. Out of sync for minutes: restart Serve on that "
        "node.",
        then=Board.USERS,
    ),
]  # fmt: skip

SERVE = [
    graph(
        "Which deployments have healthy replicas?",
        {DEPLOYMENT_LEGEND: total(exported.REPLICA_HEALTHY, DEPLOYMENT)}, "short",
        good="Each has at least one.",
        otherwise="`serve status` and the deployment's log give the reason.",
        then=Board.CAPACITY,
    ),
    graph(
        "How many replicas started in the last hour?", {DEPLOYMENT_LEGEND: starts()}, "short",
        good="As many as an upgrade or the autoscaler asked for.",
        otherwise="A steady number without either: replicas crash.",
        then=Board.CAPACITY,
    ),
    graph(
        "Which deployments raise errors?",
        {f"{DEPLOYMENT_LEGEND} {{{{exception_type}}}}": rate_of(
            exported.DEPLOYMENT_ERRORS, f"{DEPLOYMENT}, exception_type")}, "ops",
        good="None.",
        otherwise="Search the deployment's log for the exception.",
        then=Board.USERS,
    ),
    graph(
        "Where do calls wait?", {DEPLOYMENT_LEGEND: total(exported.QUEUED_CALLS, DEPLOYMENT)}, "short",
        good="Nowhere for longer than a moment.",
        otherwise="The deployment's replicas are all at max_ongoing_requests.",
        then=Board.CAPACITY,
    ),
    graph(
        "Where are calls in progress?", {DEPLOYMENT_LEGEND: total(exported.CALLS_IN_PROGRESS, DEPLOYMENT)}, "short",
        good="As many in gateways as in models: one call each for a request.",
        otherwise="Gateways have more: requests wait for limiter or ledger.",
        then=Board.MONEY,
    ),
    graph(
        "Which event loops are late?",
        {"{{component}} {{loop_type}}": quantile(0.99, exported.EVENT_LOOP_DELAY, "component, loop_type")}, "ms",
        good="p99 below 50 ms.",
        otherwise="proxy: the front door of a node. replica: gateway, limiter, accounting or model.",
        then=Board.ENGINE,
    ),
]  # fmt: skip

BOARD: Final = board(
    Board.CLUSTER,
    "Are the nodes, the front door and Ray Serve well?",
    (),
    {"Now": NOW_ROW, "Nodes": NODES, "Front door": FRONT_DOOR, "Ray Serve": SERVE},
)
