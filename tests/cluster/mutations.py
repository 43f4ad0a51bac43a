"""Mistakes in times, secrets, connections and places: what is done to a set, and what the report must contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .checks import DRAIN, HARD_STOP
from .edit import Edit, on_gpus

DATABASE = {"secretRef": {"name": "serve-app-database"}}
Change = Callable[[Edit], object]


def route(edit: Edit) -> Any:
    return edit.of("HTTPRoute")["spec"]["rules"][0]


def options(edit: Edit) -> Any:
    return edit.of("RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]


TIMES: dict[str, tuple[Change, str]] = {
    "model stops before the longest reply": (
        lambda e: e.deployment("Model", graceful_shutdown_timeout_s=500),
        "qwen25-7b: graceful_shutdown_timeout_s of Model (500 s)",
    ),
    "gateway stops before the model": (
        lambda e: e.deployment("Gateway", graceful_shutdown_timeout_s=600),
        "graceful_shutdown_timeout_s of Gateway (600 s)",
    ),
    "longer replies": (
        lambda e: e.serve(
            lambda c: c["applications"][0]["deployments"][0]["user_config"]["models"]["svc-chat"].update(
                max_output=8192
            )
        ),
        "the longest reply (939.2 s)",
    ),
    "one shard of accounting": (
        lambda e: e.serve(
            lambda c: (c["applications"][0]["args"].pop("accounting_shards"), c["applications"][0]["deployments"].pop())
        ),
        "accounting has less than two shards",
    ),
    "both shards of accounting in one pod": (
        lambda e: e.serve(
            lambda c: c["applications"][0]["deployments"][2]["ray_actor_options"]["resources"].update(accounting=0.01)
        ),
        "one pod has room for two shards of accounting",
    ),
    "HAProxy stops before the gateway": (lambda e: e.set_env("gateway", HARD_STOP, "120"), f"gateway: {HARD_STOP}"),
    "the node drains shorter than HAProxy": (lambda e: e.set_env("h100", DRAIN, "720"), f"h100: {DRAIN} (720 s)"),
    "pods end before the drain": (
        lambda e: e.pod("accounting").update(terminationGracePeriodSeconds=750),
        "accounting: the end of pods and old clusters (750 s)",
    ),
    "pods end after Kubernetes' default": (
        lambda e: e.pod("head").pop("terminationGracePeriodSeconds"),
        "head: the end of pods and old clusters (30 s)",
    ),
    "old clusters end too soon": (
        lambda e: e.of("RayService")["spec"].update(rayClusterDeletionDelaySeconds=60),
        "rayClusterDeletionDelaySeconds: the end of pods",
    ),
    "a route that cuts replies": (
        lambda e: route(e)["timeouts"].update(request="500s", backendRequest="500s"),
        "HTTPRoute/serve-app timeouts.request: 500 s would cut",
    ),
    "a route without timeouts": (lambda e: route(e).pop("timeouts"), "HTTPRoute/serve-app timeouts.request: 15 s"),
    "Google's 30 s": (
        lambda e: e.of("GCPBackendPolicy")["spec"]["default"].update(timeoutSec=30),
        "GCPBackendPolicy/serve-app: 30 s would cut",
    ),
}
SECRETS: dict[str, tuple[Change, str]] = {
    "a GPU pod with the database's secret": (
        lambda e: e.container("l40s").update(envFrom=[DATABASE]),
        "l40s: has the Secret serve-app-database",
    ),
    "the head with the gateway's secret": (
        lambda e: e.container("head")["envFrom"].append({"secretRef": {"name": "serve-app-gateway"}}),
        "head: has the Secret serve-app-gateway",
    ),
    "a gateway with the database's secret": (
        lambda e: e.container("gateway")["envFrom"].append(DATABASE),
        "gateway: has the Secret serve-app-database",
    ),
    "a secret by another way": (
        lambda e: e.pod("h100")["volumes"].append({"name": "s", "secret": {"secretName": "serve-app-database"}}),
        "h100: has the Secret serve-app-database",
    ),
    "an operator key in the manifest": (
        lambda e: e.set_env("h100", "SERVE_APP_OPERATOR_KEY", "x" * 20),
        "h100: SERVE_APP_OPERATOR_KEY is in the manifest",
    ),
    "a gateway without its secret": (
        lambda e: e.container("gateway").pop("envFrom"),
        "gateway: lacks the Secret serve-app-gateway",
    ),
    "the database's address for a gateway": (
        lambda e: e.container("gateway")["envFrom"].append({"configMapRef": {"name": "serve-app-database"}}),
        "gateway: the database's address",
    ),
    "a worker with a token of Kubernetes": (
        lambda e: e.pod("l40s").pop("automountServiceAccountToken"),
        "l40s: has a token",
    ),
}
CONNECTIONS: dict[str, tuple[Change, str]] = {
    "sslmode require": (lambda e: e.url("verify-full", "require"), "ConfigMap/serve-app-database: sslmode is require"),
    "no CA in the address": (lambda e: e.url("&sslrootcert", "&other"), "serve-app-database: no sslrootcert"),
    "no CA on the disk": (
        lambda e: e.volume("accounting", "ca", {"emptyDir": {}}),
        "accounting: no volume with the CA at /etc/serve-app/ca/database.crt",
    ),
    "a password in the address": (lambda e: e.url("serve_app@", "serve_app:pw@"), "without a password"),
    "Redis without TLS": (lambda e: options(e).update(redisAddress="redis://r:6379"), "redisAddress is not rediss://"),
    "Redis without a password": (lambda e: options(e).pop("redisPassword"), "RayService/serve-app: redisPassword"),
    "Redis without its CA": (lambda e: e.container("head").pop("envFrom"), "head: RAY_REDIS_CA_CERT is missing"),
    "no Redis": (
        lambda e: e.of("RayService")["spec"]["rayClusterConfig"].pop("gcsFaultToleranceOptions"),
        "RayService/serve-app: no gcsFaultToleranceOptions",
    ),
    "no token": (
        lambda e: e.of("RayService")["spec"]["rayClusterConfig"]["authOptions"].update(mode="disabled"),
        "RayService/serve-app: authOptions",
    ),
}
AUTHORITY = {"name": "authority", "mountPath": "/etc/serve-app/authority", "readOnly": True}
SERVER_KEY = "RAY_TLS_SERVER_KEY"


def autoscaler(edit: Edit) -> Any:
    return edit.of("RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]


CERTIFICATES: dict[str, tuple[Change, str]] = {
    "a group without TLS": (lambda e: e.set_env("h100", "RAY_USE_TLS", None), "h100: RAY_USE_TLS is not 1"),
    "TLS turned off": (lambda e: e.set_env("head", "RAY_USE_TLS", "0"), "head: RAY_USE_TLS is not 1"),
    "TLS where the wait for the head does not see it": (
        lambda e: (
            e.set_env("l40s", "RAY_USE_TLS", None),
            e.container("l40s").update(envFrom=[{"configMapRef": {"name": "tls"}}]),
        ),
        "l40s: RAY_USE_TLS is not 1",
    ),
    "no key": (
        lambda e: e.set_env("gateway", SERVER_KEY, None),
        "gateway: RAY_TLS_SERVER_KEY is not the node-key.pem of the pod's certificate",
    ),
    "a file that is not made": (
        lambda e: e.set_env("accounting", SERVER_KEY, "/etc/serve-app/tls/tls.key"),
        "accounting: RAY_TLS_SERVER_KEY is not the node-key.pem of the pod's certificate",
    ),
    "no authority to trust": (
        lambda e: e.set_env("l40s", "RAY_TLS_CA_CERT", "/etc/ssl/cert.pem"),
        "l40s: RAY_TLS_CA_CERT is not the ca.pem of the pod's certificate",
    ),
    "no certificate is made": (
        lambda e: e.pod("h100").pop("initContainers"),
        "h100: no init container makes the pod's certificate",
    ),
    "another command": (
        lambda e: e.certificate("l40s").update(command=["serve-app", "doctor"]),
        "l40s: no init container makes the pod's certificate",
    ),
    "an address of another kind": (
        lambda e: e.certificate("gateway")["env"][0].update(valueFrom={"fieldRef": {"fieldPath": "status.hostIP"}}),
        "gateway: the certificate is not for the pod's address",
    ),
    "an address that is written down": (
        lambda e: e.certificate("gateway").update(args=["10.0.0.7"]),
        "gateway: the certificate is not for the pod's address",
    ),
    "a head without its name": (
        lambda e: e.certificate("head").update(args=["$(POD_IPS)"]),
        "head: the certificate is not for the head's name",
    ),
    "a GPU pod with the head's name": (
        lambda e: e.certificate("h100").update(args=["$(POD_IPS),$(FQ_RAY_IP)"]),
        "h100: the certificate is for the head's name",
    ),
    "keys on a disk": (
        lambda e: e.volume("head", "tls", {"emptyDir": {}}),
        "head: the key of the pod's certificate is not in memory",
    ),
    "keys that Ray may replace": (
        lambda e: e.mount("accounting", "tls").pop("readOnly"),
        "accounting: the pod's certificate is writable to Ray",
    ),
    "keys in another volume": (
        lambda e: e.certificate("l40s")["volumeMounts"][1].update(name="tmp"),
        "l40s: the certificate is not written where Ray reads it",
    ),
    "the authority's key beside Ray": (
        lambda e: e.container("h100")["volumeMounts"].append(AUTHORITY),
        "h100: ray-worker has the key of the authority",
    ),
    "the authority's key in Ray's environment": (
        lambda e: e.container("gateway")["envFrom"].append({"secretRef": {"name": "serve-app-node-authority"}}),
        "gateway: ray-worker has the key of the authority",
    ),
    "the authority's key beside the autoscaler": (
        lambda e: autoscaler(e)["volumeMounts"].append(AUTHORITY),
        "RayService/serve-app autoscalerOptions: has a Secret",
    ),
    "the authority's key in another init container": (
        lambda e: e.pod("head")["initContainers"].append(e.certificate("head") | {"name": "x", "command": ["true"]}),
        "head: x has the key of the authority",
    ),
    "an authority from nowhere": (
        lambda e: e.volume("accounting", "authority", {"emptyDir": {}}),
        "accounting: --authority is no mounted Secret",
    ),
    "another authority for a group": (
        lambda e: e.volume("l40s", "authority", {"secret": {"secretName": "serve-app-redis"}}),
        "RayService/serve-app: pods of several authorities",
    ),
    "no Secret of the authority": (
        lambda e: e.remove("Secret", "serve-app-node-authority"),
        "Secret/serve-app-node-authority: must be in the template",
    ),
    "a Secret without the key": (
        lambda e: e.of("Secret", "serve-app-node-authority")["stringData"].pop("ca-key.pem"),
        "Secret/serve-app-node-authority: must be in the template",
    ),
    "an autoscaler without TLS": (
        lambda e: autoscaler(e).pop("env"),
        "RayService/serve-app autoscalerOptions: RAY_USE_TLS is not 1",
    ),
    "an autoscaler without its files": (
        lambda e: autoscaler(e).pop("volumeMounts"),
        "RayService/serve-app autoscalerOptions: the key of the pod's certificate is not in memory",
    ),
    "another image makes it": (
        lambda e: e.certificate("h100").update(image="registry.example.com/tools:1"),
        "h100: the certificate is made by another image",
    ),
    "root makes it": (
        lambda e: e.certificate("gateway")["securityContext"].update(runAsUser=0),
        "gateway: certificate may run as root",
    ),
}
PLACES: dict[str, tuple[Change, str]] = {
    "a head with CPUs": (lambda e: e.group("head")["rayStartParams"].update({"num-cpus": "4"}), "head: num-cpus"),
    "a gateway on the head": (
        lambda e: e.group("head")["rayStartParams"].update(resources='"{\\"gateway\\": 1}"'),
        "head: offers ['gateway'], so Gateway may run on the head",
    ),
    "requests to the head": (
        lambda e: e.of("RayService")["spec"].pop("excludeHeadPodFromServeSvc"),
        "head: excludeHeadPodFromServeSvc",
    ),
    "a gateway that may run anywhere": (
        lambda e: e.deployment("Gateway", ray_actor_options={"num_cpus": 1}),
        "Gateway: may run on the head or keep a GPU node busy",
    ),
    "a soft anti-affinity": (
        lambda e: e.pod("accounting").update(
            affinity={
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 1,
                            "podAffinityTerm": e.pod("accounting")["affinity"]["podAntiAffinity"][
                                "requiredDuringSchedulingIgnoredDuringExecution"
                            ][0],
                        }
                    ]
                }
            }
        ),
        "accounting: no hard anti-affinity to accounting",
    ),
    "no toleration": (lambda e: e.pod("h100").pop("tolerations"), "h100: no toleration"),
    "no nodeSelector": (lambda e: e.pod("l40s").pop("nodeSelector"), "l40s: no nodeSelector"),
    "accounting on a GPU machine": (
        lambda e: e.pod("accounting").update(tolerations=[{"operator": "Exists"}]),
        "accounting: a pod of accounting may take a GPU",
    ),
    "fewer pods than replicas": (
        lambda e: e.group("h100").update(maxReplicas=3),
        "qwen25-coder-14b.Model: up to 4 replicas, and h100 may have 3",
    ),
    "least above most": (lambda e: e.group("l40s").update(minReplicas=5), "l40s: minReplicas 5 is above"),
    "a resource that no pool offers": (
        lambda e: e.group("accounting")["rayStartParams"].pop("resources"),
        "gateway.Limiter: no pool offers",
    ),
    "a replica larger than its pod": (
        lambda e: e.backend("qwen25-coder-14b", lambda one: on_gpus(one, 2)),
        "a pod of h100 has too few GPUs",
    ),
    "limiter without a place": (
        lambda e: e.serve(lambda c: c["applications"][0]["deployments"].pop(1)),
        "gateway: Limiter is not tied",
    ),
}
