"""Mistakes in the number of gateways, their pods and their spools, as in mutations.py."""

from __future__ import annotations

from typing import Any

from .edit import Edit
from .mutations import Change


def gateway(edit: Edit, change: Any) -> None:
    """Changes the deployment of gateways."""
    edit.backend("gateway", lambda one: change(one["deployments"][0]))


def scaling(edit: Edit, **values: int) -> None:
    gateway(edit, lambda one: one["autoscaling_config"].update(values))


def share(edit: Edit, amount: float) -> None:
    gateway(edit, lambda one: one["ray_actor_options"]["resources"].update(gateway=amount))


def apart(edit: Edit) -> Any:
    """Returns the rule that keeps pods of gateways apart."""
    return edit.pod("gateway")["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]


CLAIM = {"persistentVolumeClaim": {"claimName": "serve-app-compiled"}}
SPOOL = {"name": "spool", "mountPath": "/var/lib/serve-app/spool"}

GATEWAYS: dict[str, tuple[Change, str]] = {
    "a volume claim for spools": (
        lambda e: (
            e.container("gateway")["volumeMounts"].append(SPOOL),
            e.pod("gateway")["volumes"].append({"name": "spool", **CLAIM}),
        ),
        "gateway: /var/lib/serve-app/spool is on a volume claim",
    ),
    "a volume claim for the state": (
        lambda e: e.volume("gateway", "state", CLAIM),
        "gateway: /var/lib/serve-app/spool is on a volume claim",
    ),
    "spools in memory": (
        lambda e: e.volume("gateway", "state", {"emptyDir": {"medium": "Memory", "sizeLimit": "10Gi"}}),
        "gateway: /var/lib/serve-app/spool is in memory",
    ),
    "little room for spools": (
        lambda e: e.volume("gateway", "state", {"emptyDir": {"sizeLimit": "1Gi"}}),
        "gateway: /var/lib/serve-app/spool has less room than 3 spools",
    ),
    "spools larger than the disk": (
        lambda e: gateway(e, lambda one: one["user_config"].update(spool_max_bytes=4 * 2**30)),
        "gateway: /var/lib/serve-app/spool has less room than 3 spools",
    ),
    "a group that scales to zero": (
        lambda e: e.group("gateway").update(minReplicas=0),
        "gateway: minReplicas is 0, and min_replicas 4 needs 2",
    ),
    "one pod at least": (
        lambda e: e.group("gateway").update(minReplicas=1),
        "gateway: minReplicas is 1, and min_replicas 4 needs 2",
    ),
    "pods without gateways": (
        lambda e: e.group("gateway").update(minReplicas=3),
        "gateway: minReplicas is 3, and min_replicas 4 needs 2",
    ),
    "gateways that scale to zero": (
        lambda e: scaling(e, min_replicas=0),
        "min_replicas: must be at least 1: a request can't start a gateway",
    ),
    "gateways that fit into one pod": (
        lambda e: (scaling(e, min_replicas=3), e.group("gateway").update(minReplicas=1)),
        "gateway.Gateway: 3 gateways fit into one pod",
    ),
    "a share that lets all gateways fit into one pod": (
        lambda e: share(e, 0.01),
        "gateway.Gateway: 4 gateways fit into one pod",
    ),
    "a fixed number that fits into one pod": (
        lambda e: gateway(e, lambda one: (one.pop("autoscaling_config"), one.update(num_replicas=2))),
        "gateway.Gateway: 2 gateways fit into one pod",
    ),
    "one gateway in a pod, as before": (
        lambda e: gateway(e, lambda one: one.update(max_replicas_per_node=1)),
        "gateway.Gateway: up to 12 replicas, and gateway may have 4 pods with 4 places",
    ),
    "more gateways than places": (
        lambda e: scaling(e, max_replicas=13),
        "gateway.Gateway: up to 13 replicas, and gateway may have 4 pods with 12 places",
    ),
    "no core for HAProxy": (
        lambda e: e.container("gateway")["resources"].update(
            requests={"cpu": "3500m", "memory": "8Gi"}, limits={"cpu": "3.5", "memory": "8Gi"}
        ),
        "gateway.Gateway: a pod of gateway has no core for HAProxy beside 3 gateways",
    ),
    "shares that leave the console no room": (
        lambda e: share(e, 0.3333),
        "gateway.Gateway: a pod of gateway with 3 gateways has no room for Console: too little gateway",
    ),
    "CPUs that leave the console no room": (
        lambda e: e.deployment("Console", ray_actor_options={"num_cpus": 2, "resources": {"gateway": 0.01}}),
        "gateway.Gateway: a pod of gateway with 3 gateways has no room for Console: too little CPU",
    ),
    "no anti-affinity": (
        lambda e: e.pod("gateway").pop("affinity"),
        "gateway: no hard anti-affinity to gateway",
    ),
    "an anti-affinity between zones": (
        lambda e: apart(e).update(topologyKey="topology.kubernetes.io/zone"),
        "gateway: no hard anti-affinity to gateway",
    ),
    "an anti-affinity to other pods": (
        lambda e: apart(e)["labelSelector"]["matchLabels"].update({"app.kubernetes.io/component": "accounting"}),
        "gateway: no hard anti-affinity to gateway",
    ),
    "an anti-affinity that counts the old cluster": (
        lambda e: apart(e).pop("matchLabelKeys"),
        "gateway: the anti-affinity also counts the pods of an old cluster",
    ),
    "a budget of all gateways' pods": (
        lambda e: e.of("PodDisruptionBudget", "serve-app-gateway")["spec"].update(minAvailable=2),
        "PodDisruptionBudget/serve-app-gateway: minAvailable",
    ),
}
