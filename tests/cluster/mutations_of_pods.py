"""Mistakes in pods, volumes, networks and routes, as in mutations.py."""

from __future__ import annotations

from typing import Any

from .edit import Edit
from .mutations import Change, options, route


def policy(edit: Edit, side: str) -> Any:
    return edit.of("NetworkPolicy")["spec"][side]


PODS: dict[str, tuple[Change, str]] = {
    "root": (lambda e: e.pod("h100")["securityContext"].update(runAsUser=0), "h100: may run as root"),
    "root by default": (lambda e: e.pod("head").pop("securityContext"), "head: may run as root"),
    "a writable root": (
        lambda e: e.container("gateway")["securityContext"].update(readOnlyRootFilesystem=False),
        "gateway: the root file system",
    ),
    "privileges": (
        lambda e: e.container("l40s")["securityContext"].pop("allowPrivilegeEscalation"),
        "l40s: may gain privileges",
    ),
    "capabilities": (lambda e: e.container("head")["securityContext"].pop("capabilities"), "head: keeps capabilities"),
    "an image of any version": (
        lambda e: e.container("h100").update(image="registry.example.com/serve-app-model:latest"),
        "h100: the image registry.example.com/serve-app-model:latest is not pinned",
    ),
    "an image without a tag": (
        lambda e: e.container("head").update(image="registry.example.com:5000/serve-app"),
        "head: the image registry.example.com:5000/serve-app is not pinned",
    ),
    "a Job's image": (
        lambda e: e.of("Job", "fetch-models")["spec"]["template"]["spec"]["containers"][0].update(image="serve-app"),
        "Job/fetch-models: the image serve-app is not pinned",
    ),
    "no limits": (lambda e: e.container("accounting")["resources"].pop("limits"), "accounting: no limits of memory"),
    "a claim that is not there": (
        lambda e: e.remove("PersistentVolumeClaim", "serve-app-compiled"),
        "h100: there is no PersistentVolumeClaim serve-app-compiled",
    ),
    "weights that can be written": (
        lambda e: e.mount("l40s", "models").pop("readOnly"),
        "l40s: the shared weights are not read-only",
    ),
    "weights that nobody fetches": (
        lambda e: e.serve(lambda c: c["applications"][1]["args"].update(model="Qwen/Qwen3-8B")),
        "Job/fetch-models: does not fetch Qwen/Qwen3-8B",
    ),
    "shared memory on a disk": (lambda e: e.volume("h100", "shm", {"emptyDir": {}}), "h100: /dev/shm is not memory"),
    "another Ray": (
        lambda e: e.of("RayService")["spec"]["rayClusterConfig"].update(rayVersion="2.59.0"),
        "RayService/serve-app: rayVersion 2.59.0",
    ),
    "a dead field": (
        lambda e: e.of("RayService")["spec"].update(serviceUnhealthySecondThreshold=900),
        "RayService/serve-app: serviceUnhealthySecondThreshold is a dead field",
    ),
    "another dead field": (
        lambda e: e.of("RayService")["spec"].update(deploymentUnhealthySecondThreshold=600),
        "RayService/serve-app: deploymentUnhealthySecondThreshold is a dead field",
    ),
    "an annotation that nobody reads": (
        lambda e: e.group("head")["template"]["metadata"].update(annotations={"prometheus.io/scrape": "true"}),
        "head: Prometheus' operator ignores",
    ),
    "a misspelt key of Serve": (
        lambda e: e.deployment("Model", graceful_shutdown_timeout=600),
        "RayService/serve-app serveConfigV2.applications.1",
    ),
}
NETWORK: dict[str, tuple[Change, str]] = {
    "no DNS of the cluster": (
        lambda e: policy(e, "egress")[1]["to"].pop(0),
        "NetworkPolicy/serve-app: head: no DNS of the cluster",
    ),
    "no DNS of the node's cache": (
        lambda e: policy(e, "egress")[1]["to"].pop(1),
        "NetworkPolicy/serve-app: h100: no DNS of the node's cache",
    ),
    "DNS over TCP alone": (
        lambda e: policy(e, "egress")[1]["ports"].pop(0),
        "NetworkPolicy/serve-app: l40s: no DNS of the cluster (UDP 53",
    ),
    "no way to the database": (
        lambda e: e.remove("NetworkPolicy", "serve-app-database"),
        "NetworkPolicy/serve-app: accounting: can't reach the database",
    ),
    "a database inside the cluster on Cilium": (
        lambda e: e.of("NetworkPolicy", "serve-app-database")["spec"]["egress"][0]["to"].pop(0),
        "NetworkPolicy/serve-app: accounting: can't reach the database",
    ),
    "the database for all": (
        lambda e: policy(e, "egress").append(
            {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}], "ports": [{"port": 5432}]}
        ),
        "NetworkPolicy/serve-app: l40s: reaches the database without need",
    ),
    "no way to Redis": (
        lambda e: options(e).update(redisAddress="rediss://redis.example.com:6380"),
        "NetworkPolicy/serve-app: head: the head can't reach Redis",
    ),
    "the machine's credentials": (
        lambda e: e.of("NetworkPolicy", "serve-app-head")["spec"]["egress"][0]["to"][1]["ipBlock"].pop("except"),
        "NetworkPolicy/serve-app-head: pods may ask 169.254.169.254",
    ),
    "a console that sends nothing": (
        lambda e: e.remove("NetworkPolicy", "serve-app-console"),
        "NetworkPolicy/serve-app: gateway: the console can't reach public addresses at [443, 587]",
    ),
    "a console without mail": (
        lambda e: e.of("NetworkPolicy", "serve-app-console")["spec"]["egress"][0]["ports"].pop(1),
        "NetworkPolicy/serve-app: gateway: the console can't reach public addresses at [587]",
    ),
    "webhooks into the network": (
        lambda e: e.of("NetworkPolicy", "serve-app-console")["spec"]["egress"][0]["to"][0]["ipBlock"]["except"].pop(1),
        "NetworkPolicy/serve-app: gateway: a customer's webhook may lead to 172.16.0.1",
    ),
    "an open port": (
        lambda e: policy(e, "ingress")[1]["ports"].append({"protocol": "TCP", "port": 6379}),
        "NetworkPolicy/serve-app: ports are open to others",
    ),
    "no policy": (lambda e: e.remove("NetworkPolicy"), "NetworkPolicy/serve-app: l40s: no policy closes it"),
    "no port of HAProxy's": (
        lambda e: e.of("PodMonitor")["spec"]["podMetricsEndpoints"].pop(1),
        "PodMonitor/serve-app: nothing reads port 9101",
    ),
    "a monitor of other pods": (
        lambda e: e.of("PodMonitor")["spec"]["selector"]["matchLabels"].update({"ray.io/node-type": "head"}),
        "PodMonitor/serve-app: nothing reads port 8080",
    ),
    "Prometheus kept out": (
        lambda e: policy(e, "ingress")[2]["ports"].pop(1),
        "NetworkPolicy/serve-app: h100: Prometheus can't read port 9101",
    ),
    "no alerts": (lambda e: e.remove("PrometheusRule"), "PrometheusRule: there are no alerts"),
    "a service of another name": (
        lambda e: route(e)["backendRefs"][0].update(name="serve-app"),
        "HTTPRoute/serve-app: goes to serve-app:8000",
    ),
    "a port that differs": (
        lambda e: e.serve(lambda c: c["http_options"].update(port=9000)),
        "HTTPRoute/serve-app: goes to serve-app-serve-svc:8000, and the service is serve-app-serve-svc:9000",
    ),
    "a container port that differs": (
        lambda e: e.port("gateway", "serve").update(containerPort=8001),
        "gateway: ports serve and metrics must be 8000",
    ),
    "/admin published": (
        lambda e: route(e)["matches"].append({"path": {"type": "PathPrefix", "value": "/"}}),
        "HTTPRoute/serve-app: publishes /admin",
    ),
    "no certificate": (lambda e: e.remove("Certificate", "serve-app-tls"), "Gateway/serve-app: no Certificate"),
    "requests without TLS": (
        lambda e: e.of("HTTPRoute")["spec"]["parentRefs"][0].update(sectionName="http"),
        "Gateway/serve-app: serves requests without TLS",
    ),
    "another Gateway": (
        lambda e: e.of("HTTPRoute")["spec"]["parentRefs"][0].update(name="other"),
        "HTTPRoute/serve-app: no Gateway other",
    ),
    "no budget for the gateways": (
        lambda e: e.remove("PodDisruptionBudget", "serve-app-gateway"),
        "gateway: no PodDisruptionBudget",
    ),
    "a budget that lets none go": (
        lambda e: e.of("PodDisruptionBudget", "serve-app-h100")["spec"].update(minAvailable=2),
        "PodDisruptionBudget/serve-app-h100: minAvailable",
    ),
    "a budget that Kubernetes can't count": (
        lambda e: e.of("PodDisruptionBudget", "serve-app-accounting")["spec"].update(minAvailable="50%"),
        "PodDisruptionBudget/serve-app-accounting: minAvailable",
    ),
    "another namespace": (
        lambda e: e.of("PodMonitor")["metadata"].update(namespace="default"),
        "PodMonitor/serve-app: is not in the namespace serve-app",
    ),
}
