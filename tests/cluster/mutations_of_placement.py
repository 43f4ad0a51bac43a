"""Mistakes in placement, images, the way of requests, and what CustomResourceDefinitions refuse, as in mutations.py."""

from __future__ import annotations

from typing import Any

from .edit import Edit, on_gpus
from .mutations import Change, route


def spread(edit: Edit, name: str) -> Any:
    return edit.pod(name)["topologySpreadConstraints"][0]


def service(edit: Edit) -> Any:
    return edit.of("RayService")["spec"]["serveService"]


PLACEMENT: dict[str, tuple[Change, str]] = {
    "no priority": (
        lambda e: e.pod("h100").pop("priorityClassName"),
        "h100: its priority class None is not above zero",
    ),
    "a priority class that is not there": (
        lambda e: e.remove("PriorityClass", "serve-app"),
        "gateway: its priority class serve-app is not above zero",
    ),
    "the service below batch jobs": (
        lambda e: e.of("PriorityClass").update(value=-1),
        "l40s: its priority class serve-app is not above zero",
    ),
    "batch jobs above others": (
        lambda e: e.of("PriorityClass", "serve-app-batch").update(value=2000000),
        "Job/fetch-models: its priority class serve-app-batch is not below zero",
    ),
    "one zone for all": (
        lambda e: e.pod("accounting").pop("topologySpreadConstraints"),
        "accounting: no topologySpreadConstraints over topology.kubernetes.io/zone",
    ),
    "machines for zones": (
        lambda e: spread(e, "h100").update(topologyKey="kubernetes.io/hostname"),
        "h100: no topologySpreadConstraints over topology.kubernetes.io/zone",
    ),
    "a spread of other pods": (
        lambda e: spread(e, "gateway")["labelSelector"]["matchLabels"].update({"app.kubernetes.io/name": "gateway"}),
        "gateway: no topologySpreadConstraints over topology.kubernetes.io/zone that count its own pods",
    ),
    "a spread that counts the old cluster": (
        lambda e: spread(e, "l40s").pop("matchLabelKeys"),
        "l40s: topologySpreadConstraints also count the pods of an old cluster",
    ),
    "a gateway on a spot machine": (
        lambda e: e.pod("gateway").update(nodeSelector={"cloud.google.com/gke-spot": "true"}),
        "gateway: may run on a spot machine",
    ),
    "accounting that tolerates spot machines": (
        lambda e: e.pod("accounting").update(tolerations=[{"key": "karpenter.sh/capacity-type", "operator": "Exists"}]),
        "accounting: may run on a spot machine",
    ),
    "little shared memory": (
        lambda e: e.volume("h100x4", "shm", {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}),
        "h100x4: /dev/shm has too little room beside the object store",
    ),
    "an object store without a limit": (
        lambda e: e.group("h100x4")["rayStartParams"].pop("object-store-memory"),
        "h100x4: no object-store-memory",
    ),
    "an object store that fills the shared memory": (
        lambda e: e.group("l40s")["rayStartParams"].update({"object-store-memory": "8000000000"}),
        "l40s: /dev/shm has too little room beside the object store",
    ),
    "shared memory that the pod does not have": (
        lambda e: e.volume("l40s", "shm", {"emptyDir": {"medium": "Memory", "sizeLimit": "40Gi"}}),
        "l40s: /dev/shm may take more than half of the pod's memory",
    ),
    "compiled kernels that go with the pod": (
        lambda e: e.volume("h100", "compiled", {"emptyDir": {}}),
        "qwen25-coder-14b.Model: cache_dir '/var/cache/compiled' is not on a shared volume of h100",
    ),
    "compiled kernels elsewhere": (
        lambda e: e.backend("qwen25-7b", lambda one: one["args"].pop("cache_dir")),
        "qwen25-7b.Model: cache_dir '' is not on a shared volume of l40s",
    ),
    "a cache for reading alone": (
        lambda e: e.mount("h100x4", "compiled").update(readOnly=True),
        "qwen25-72b.Model: cache_dir '/var/cache/compiled' can't be written in h100x4",
    ),
    "a cache for one machine": (
        lambda e: e.of("PersistentVolumeClaim", "serve-app-compiled")["spec"].update(accessModes=["ReadWriteOnce"]),
        "cache_dir '/var/cache/compiled' is not on a shared volume of l40s",
    ),
    "pods without replicas": (
        lambda e: e.group("h100x4").update(minReplicas=1),
        "h100x4: minReplicas is 1, and min_replicas 0",
    ),
    "replicas without pods": (
        lambda e: e.group("l40s").update(minReplicas=0),
        "l40s: minReplicas is 0, and min_replicas 2",
    ),
    "GPUs that no replica uses": (
        lambda e: e.backend("qwen25-72b", lambda one: on_gpus(one, 2)),
        "qwen25-72b.Model: a pod of h100x4 has 4 GPUs, and its replica uses 2",
    ),
    "an upgrade with two limiters": (
        lambda e: e.of("RayService")["spec"].update(
            upgradeStrategy={
                "type": "NewClusterWithIncrementalUpgrade",
                "clusterUpgradeOptions": {"gatewayClassName": "envoy", "stepSizePercent": 25, "intervalSeconds": 60},
            }
        ),
        "RayService/serve-app: upgradeStrategy is not NewCluster",
    ),
}
IMAGES: dict[str, tuple[Change, str]] = {
    "an image by its tag": (
        lambda e: e.container("h100").update(image="registry.example.com/serve-app-model:0.1.0"),
        "h100: the image registry.example.com/serve-app-model:0.1.0 is not pinned",
    ),
    "an init container's image by its tag": (
        lambda e: e.certificate("head").update(image="registry.example.com/serve-app-gateway:0.1.0"),
        "head: the image registry.example.com/serve-app-gateway:0.1.0 is not pinned",
    ),
    "no login at the registry": (
        lambda e: e.pod("accounting").pop("imagePullSecrets"),
        "accounting: no imagePullSecrets: serve-app-registry",
    ),
    "a Job without a login": (
        lambda e: e.of("Job", "fetch-models")["spec"]["template"]["spec"].pop("imagePullSecrets"),
        "Job/fetch-models: no imagePullSecrets: serve-app-registry",
    ),
    "a Secret that no store has": (
        lambda e: e.remove("ExternalSecret", "serve-app-redis"),
        "ExternalSecret/serve-app-redis: must make the keys password",
    ),
    "a Secret with a key less": (
        lambda e: e.of("ExternalSecret", "serve-app-gateway")["spec"]["data"].pop(),
        "ExternalSecret/serve-app-gateway: must make the keys SERVE_APP_OPERATOR_KEY, SERVE_APP_SECRET_KEY",
    ),
}
REQUESTS: dict[str, tuple[Change, str]] = {
    "requests to the proxies of GPU pods": (
        lambda e: service(e)["spec"]["ports"][0].update(targetPort=8000),
        "RayService/serve-app serveService: must be serve-app-serve-svc, from port 8000 to the port named serve",
    ),
    "KubeRay's own Service": (
        lambda e: e.of("RayService")["spec"].pop("serveService"),
        "RayService/serve-app serveService: must be serve-app-serve-svc",
    ),
    "a GPU pod with the gateways' port": (
        lambda e: e.container("l40s")["ports"].append({"name": "serve", "containerPort": 8000}),
        "l40s: ports serve and metrics must be None and 8080",
    ),
    "a head without the port of the Service": (
        lambda e: e.container("head")["ports"].remove(e.port("head", "serve")),
        "head: ports serve and metrics must be 8000 and 8080",
    ),
    "clients let in to all pods": (
        lambda e: e.of("NetworkPolicy", "serve-app-gateway")["spec"]["podSelector"]["matchLabels"].pop(
            "app.kubernetes.io/component"
        ),
        "NetworkPolicy/serve-app: h100: clients reach port 8000",
    ),
    "clients kept out": (
        lambda e: e.remove("NetworkPolicy", "serve-app-gateway"),
        "NetworkPolicy/serve-app: gateway: clients cannot reach port 8000",
    ),
}
# What the API server refuses by the rules (CEL) of a definition, not by its types.
DEFINITIONS: dict[str, tuple[Change, str]] = {
    "a health check of two ports": (
        lambda e: e.of("HealthCheckPolicy")["spec"]["default"]["config"]["httpHealthCheck"].update(port=8000),
        "HealthCheckPolicy/serve-app: spec.default.config.httpHealthCheck: port and portName must be unset",
    ),
    "a path that is not one": (
        lambda e: route(e)["matches"][0]["path"].update(value="//chat/completions"),
        "HTTPRoute/serve-app: spec.rules.0.matches.0.path: must not contain '//'",
    ),
    "a timeout longer than the request's": (
        lambda e: route(e)["timeouts"].update(backendRequest="730s"),
        "HTTPRoute/serve-app: spec.rules.0.timeouts: backendRequest timeout cannot be longer than request timeout",
    ),
    "a backend without a port": (
        lambda e: route(e)["backendRefs"][0].pop("port"),
        "HTTPRoute/serve-app: spec.rules.0.backendRefs.0: Must have port for Service reference",
    ),
    "listeners of one name": (
        lambda e: e.of("Gateway")["spec"]["listeners"][1].update(name="https"),
        "Gateway/serve-app: spec.listeners: Listener name must be unique",
    ),
    "TLS on a plain listener": (
        lambda e: e.of("Gateway")["spec"]["listeners"][1].update(tls={"certificateRefs": [{"name": "serve-app-tls"}]}),
        "Gateway/serve-app: spec.listeners: tls must not be specified for protocols",
    ),
    "a misspelt field of a monitor": (
        lambda e: e.of("PodMonitor")["spec"]["podMetricsEndpoints"][0].update(intervall="5s"),
        "PodMonitor/serve-app: spec.podMetricsEndpoints.0: Additional properties are not allowed ('intervall'",
    ),
    "a misspelt field of a store": (
        lambda e: e.of("ExternalSecret", "serve-app-database")["spec"].update(refresh="1h"),
        "ExternalSecret/serve-app-database: spec: Additional properties are not allowed ('refresh'",
    ),
}
