"""Rules for where pods run and what they keep: priority, zones, spot machines, memory, compiled kernels, no replica."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from .manifests import Document, Manifests, Pool, selects

ZONE = "topology.kubernetes.io/zone"
SPOT = re.compile(r"spot|capacity-?type|preemptible", re.IGNORECASE)
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MIN_SHM = 4 * 2**30  # bytes for NCCL and vLLM's processes, beside Ray's object store


def priority_problems(manifests: Manifests) -> Iterator[str]:
    """The service is above everything that can wait."""
    classes = {one["metadata"]["name"]: one["value"] for one in manifests.of("PriorityClass")}
    waiting = [one["spec"]["template"]["spec"].get("priorityClassName") for one in manifests.of("Job")]
    for name in waiting:
        if classes.get(name, 0) >= 0:
            yield f"Job/fetch-models: its priority class {name} is not below zero, the value of pods without one"
    for pool in manifests.pools:
        name = pool.spec.get("priorityClassName")
        if classes.get(name, 0) <= 0:
            yield f"{pool.where}: its priority class {name} is not above zero, the value of pods without one"


def zone_problems(manifests: Manifests) -> Iterator[str]:
    """Pods of one role are in different zones, those of an old cluster apart."""
    for pool in manifests.pools[1:]:
        spread = [one for one in pool.spec.get("topologySpreadConstraints", []) if one["topologyKey"] == ZONE]
        if not any(selects(one.get("labelSelector", {}), pool.labels) for one in spread):
            yield f"{pool.where}: no topologySpreadConstraints over {ZONE} that count its own pods"
        elif "ray.io/cluster" not in spread[0].get("matchLabelKeys", []):
            yield f"{pool.where}: topologySpreadConstraints also count the pods of an old cluster"


def spot_problems(manifests: Manifests) -> Iterator[str]:
    """Only model replicas run on spot machines: the head, gateways and accounting need their grace period."""
    for pool in manifests.pools:
        keys = [*pool.spec.get("nodeSelector", {}), *(one.get("key", "") for one in pool.spec.get("tolerations", []))]
        if pool.role != "model" and any(SPOT.search(key) for key in keys):
            yield f"{pool.where}: may run on a spot machine"


def size(quantity: str) -> int:
    """Returns bytes."""
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) * UNITS[unit] if unit in UNITS else int(quantity)


def memory_problems(manifests: Manifests) -> Iterator[str]:
    """GPU pods have room in /dev/shm beside Ray's object store, and memory for all of it."""
    for pool in manifests.pools:
        if pool.role != "model":
            continue
        store = pool.start.get("object-store-memory")
        volume = pool.mounts.get("/dev/shm", {}).get("emptyDir", {})
        if store is None:
            yield f"{pool.where}: no object-store-memory: Ray takes nearly all of /dev/shm"
        elif size(volume.get("sizeLimit", "0")) - int(store) < MIN_SHM:
            yield f"{pool.where}: /dev/shm has too little room beside the object store: 4 GiB are needed"
        limit = pool.container["resources"].get("limits", {}).get("memory", "0")
        if size(volume.get("sizeLimit", "0")) * 2 > size(limit):
            yield f"{pool.where}: /dev/shm may take more than half of the pod's memory"


def cache_problems(manifests: Manifests) -> Iterator[str]:
    """Finds replicas whose compiled kernels do not outlive the pod: each start would compile for minutes."""
    claims = {one["metadata"]["name"]: one for one in manifests.of("PersistentVolumeClaim")}
    for application, deployment in manifests.deployments() if manifests.production else ():
        if application["args"].get("engine") != "vllm":
            continue
        where = f"RayService/serve-app {application['name']}.{deployment['name']}"
        folder = application["args"].get("cache_dir", "")
        for pool in manifests.pools_of(deployment):
            volume = volume_of(pool, folder)
            claim = claims.get(volume.get("persistentVolumeClaim", {}).get("claimName", ""))
            if claim is None or "ReadWriteMany" not in claim["spec"]["accessModes"]:
                yield f"{where}: cache_dir {folder!r} is not on a shared volume of {pool.name}"
            elif volume["mount"].get("readOnly"):
                yield f"{where}: cache_dir {folder!r} can't be written in {pool.name}"


def volume_of(pool: Pool, folder: str) -> Document:
    parents = [folder, *map(str, PurePosixPath(folder).parents)]
    return next((pool.mounts[path] for path in parents if path in pool.mounts), {})


def zero_problems(manifests: Manifests) -> Iterator[str]:
    """Pods go as far down as the replicas on them, and no further. Several pools may offer one resource."""
    replicas: dict[tuple[str, ...], int] = {}
    pods: dict[tuple[str, ...], float] = {}
    for _, deployment in manifests.deployments():
        pools = manifests.pools_of(deployment)
        places = min((pool.places(deployment) for pool in pools), default=0)
        if (scaling := deployment.get("autoscaling_config")) and places:
            names = tuple(pool.name for pool in pools)
            replicas[names] = replicas.get(names, 0) + scaling["min_replicas"]
            pods[names] = pods.get(names, 0) + scaling["min_replicas"] / places
    kept = {pool.name: pool.least for pool in manifests.pools}
    for names, needed in pods.items():
        if math.ceil(needed) != (given := sum(kept[name] for name in names)):
            where = f"RayService/serve-app {', '.join(names)}"
            yield f"{where}: minReplicas is {given}, and min_replicas {replicas[names]} needs {math.ceil(needed)}"


def secret_store_problems(manifests: Manifests) -> Iterator[str]:
    """An ExternalSecret makes each Secret of the template, with all of its keys."""
    made = {
        one["spec"]["target"]["name"]: {entry["secretKey"] for entry in one["spec"]["data"]}
        for one in manifests.of("ExternalSecret")
    }
    for secret in manifests.of("Secret"):
        name = secret["metadata"]["name"]
        if made.get(name) != set(secret["stringData"]):
            yield f"ExternalSecret/{name}: must make the keys {', '.join(secret['stringData'])}"
