"""Metrics of Ray and HAProxy that the boards use. Ray's metrics have their names in Ray's source code."""

from __future__ import annotations

from typing import Final

from serve_app.contracts import metrics
from serve_app.contracts.metric import Metric

# Metrics of Ray Serve. Those of replicas also have the labels `application`, `deployment` and `replica`.
HTTP_REQUESTS: Final = Metric(
    "counter", "serve_num_http_requests", "requests", "Requests through Serve's front door",
    ("route", "method", "application", "status_code"),
)  # fmt: skip
HTTP_ERRORS: Final = Metric(
    "counter", "serve_num_http_error_requests", "requests", "HTTP requests with a status of 400 or more",
    ("route", "error_code", "method", "application"),
)  # fmt: skip
DEPLOYMENT_ERRORS: Final = Metric(
    "counter", "serve_deployment_error_counter", "calls", "Calls of a replica that raised", ("route", "exception_type")
)
REPLICA_STARTS: Final = Metric(
    "counter", "serve_deployment_replica_starts", "starts", "1 for each replica, from its start"
)
REPLICA_HEALTHY: Final = Metric(
    "gauge", "serve_deployment_replica_healthy", "replicas", "1 for each healthy replica, 0 for the others",
    ("deployment", "application"),
)  # fmt: skip
APPLICATION_STATUS: Final = Metric(
    "gauge", "serve_application_status", "status",
    "0 unknown, 1 deploy failed, 2 unhealthy, 3 not started, 4 deleting, 5 deploying, 6 running", ("application",),
)  # fmt: skip
DEPLOYMENT_STATUS: Final = Metric(
    "gauge", "serve_deployment_status", "status",
    "0 unknown, 1 deploy failed, 2 unhealthy, 3 updating, 4 upscaling, 5 downscaling, 6 healthy",
    ("deployment", "application"),
)  # fmt: skip
QUEUED_CALLS: Final = Metric(
    "gauge", "serve_deployment_queued_queries", "calls", "Calls that wait for a free replica",
    ("deployment", "application", "handle", "actor_id"),
)  # fmt: skip
CALLS_IN_PROGRESS: Final = Metric("gauge", "serve_replica_processing_queries", "calls", "Calls in a replica")
TARGET_REPLICAS: Final = Metric(
    "gauge", "serve_autoscaling_target_replicas", "replicas", "Number of replicas that Serve aims at",
    ("deployment", "application"),
)  # fmt: skip
DESIRED_REPLICAS: Final = Metric(
    "gauge", "serve_autoscaling_desired_replicas", "replicas", "The policy's decision, before min and max",
    ("deployment", "application"),
)  # fmt: skip
EVENT_LOOP_DELAY: Final = Metric(
    "histogram", "serve_event_loop_scheduling_latency_ms", "milliseconds", "How late an event loop runs a task",
    ("component", "loop_type", "actor_id"),
)  # fmt: skip
HAPROXY_PROCESSES: Final = Metric(
    "gauge", "serve_haproxy_process_count", "processes", "HAProxy's processes on a node", ("node_id",)
)
HAPROXY_MISMATCH: Final = Metric(
    "gauge", "serve_haproxy_target_mismatch", "targets", "Replicas known to only one of HAProxy and Serve's controller",
    ("node_id",),
)  # fmt: skip

# Metrics of Ray's agent, which runs on each node.
_NODE: Final = ("ip", "RayNodeType", "IsHeadNode")
_GPU: Final = (*_NODE, "GpuDeviceName", "GpuIndex", "GpuUuid")
NODE_CPU: Final = Metric("gauge", "node_cpu_utilization", "percent", "CPU in use", _NODE)
NODE_MEMORY_USED: Final = Metric("gauge", "node_mem_used", "bytes", "Memory in use", _NODE)
NODE_MEMORY_TOTAL: Final = Metric("gauge", "node_mem_total", "bytes", "Total memory", _NODE)
NODE_DISK: Final = Metric("gauge", "node_disk_utilization_percentage", "percent", "Disk in use", _NODE)
GPU_USE: Final = Metric("gauge", "node_gpus_utilization", "percent", "Time in which a GPU computes", _GPU)
GPU_MEMORY_USED: Final = Metric("gauge", "node_gram_used", "megabytes", "Memory of a GPU in use", _GPU)
GPU_MEMORY_FREE: Final = Metric("gauge", "node_gram_available", "megabytes", "Memory of a GPU that is free", _GPU)


class HaproxyMetric(Metric):
    """A metric of HAProxy. Its exported name has no prefix."""

    __slots__ = ()

    @property
    def exported(self) -> str:
        return self.name + ("_total" if self.kind == "counter" else "")


HAPROXY_CONNECTIONS: Final = HaproxyMetric(
    "gauge", "haproxy_process_current_connections", "connections", "Open connections"
)
HAPROXY_MAX_CONNECTIONS: Final = HaproxyMetric("gauge", "haproxy_process_max_connections", "connections", "Limit")
HAPROXY_RESPONSES: Final = HaproxyMetric(
    "counter", "haproxy_frontend_http_responses", "responses", "Sent to clients, by class of status", ("proxy", "code")
)
HAPROXY_BACKEND_REQUESTS: Final = HaproxyMetric(
    "counter", "haproxy_backend_http_requests", "requests", "Sent to a backend of HAProxy", ("proxy",)
)
HAPROXY_DENIED: Final = HaproxyMetric(
    "counter", "haproxy_frontend_requests_denied", "requests", "Refused by HAProxy itself", ("proxy",)
)
HAPROXY_QUEUE: Final = HaproxyMetric(
    "gauge", "haproxy_server_current_queue", "requests", "Requests that wait in HAProxy", ("proxy", "server")
)

OF_GPUS: Final = (GPU_USE, GPU_MEMORY_USED, GPU_MEMORY_FREE)  # absent where no node has a GPU
RAYS: Final = (
    HTTP_REQUESTS, HTTP_ERRORS, DEPLOYMENT_ERRORS, REPLICA_STARTS, REPLICA_HEALTHY, APPLICATION_STATUS,
    DEPLOYMENT_STATUS, QUEUED_CALLS, CALLS_IN_PROGRESS, TARGET_REPLICAS, DESIRED_REPLICAS, EVENT_LOOP_DELAY,
    HAPROXY_PROCESSES, HAPROXY_MISMATCH, NODE_CPU, NODE_MEMORY_USED, NODE_MEMORY_TOTAL, NODE_DISK, *OF_GPUS,
)  # fmt: skip
HAPROXYS: Final = (
    HAPROXY_CONNECTIONS, HAPROXY_MAX_CONNECTIONS, HAPROXY_RESPONSES, HAPROXY_BACKEND_REQUESTS, HAPROXY_DENIED,
    HAPROXY_QUEUE,
)  # fmt: skip


def series(metric: Metric) -> tuple[str, ...]:
    """Returns the names under which Prometheus has a metric."""
    if metric.kind != "histogram":
        return (metric.exported,)
    return tuple(f"{metric.exported}_{part}" for part in ("bucket", "sum", "count"))


#: Every name that an expression may hold, with its metric.
SERIES: Final = {name: metric for metric in (*metrics.ALL, *RAYS, *HAPROXYS) for name in series(metric)}
