"""Rules for gateways: several in a pod, pods that come and go, and spools that go with the pod."""

from __future__ import annotations

from collections.abc import Iterator

from serve_app.settings import GatewaySettings, parse
from serve_app.storage.request_log import FILE_BYTES, KEPT

from .checks import Document, asked_of
from .manifests import Manifests, Pool
from .placement_rules import size, volume_of

HAPROXY_CPUS = 1.0


def gateway_problems(manifests: Manifests) -> Iterator[str]:
    for application, deployment in manifests.deployments():
        if deployment["name"] == "Gateway":
            where = f"RayService/serve-app {application['name']}.Gateway"
            for pool in manifests.pools_of(deployment):
                processes = min(pool.places(deployment), most(deployment))
                yield from (f"{pool.where}: {one}" for one in _spool_problems(pool, deployment, processes))
                yield from (f"{where}: {one}" for one in _room_problems(manifests, pool, deployment, processes))
            places = max((pool.places(deployment) for pool in manifests.pools_of(deployment)), default=0)
            if manifests.production and least(deployment) <= places:
                yield f"{where}: {least(deployment)} gateways fit into one pod: a lost pod would take all of them along"


def least(deployment: Document) -> int:
    """Returns the minimum number of replicas."""
    return deployment.get("autoscaling_config", {}).get("min_replicas", deployment.get("num_replicas", 1))


def most(deployment: Document) -> int:
    """Returns the maximum number of replicas."""
    return deployment.get("autoscaling_config", {}).get("max_replicas", deployment.get("num_replicas", 1))


def _spool_problems(pool: Pool, deployment: Document, processes: int) -> Iterator[str]:
    """The spools of all processes, and their logs, fit on a disk that belongs to this pod alone."""
    path = f"{pool.env.get('SERVE_APP_HOME', {}).get('value', '')}/spool"
    volume = volume_of(pool, path)
    if "persistentVolumeClaim" in volume:
        yield f"{path} is on a volume claim, which all pods of the group would share"
    elif volume.get("emptyDir", {}).get("medium") == "Memory":
        yield f"{path} is in memory, and not on a disk"
    else:
        settings = parse(GatewaySettings, deployment["user_config"], "user_config")
        needed = processes * settings.spool_max_bytes + KEPT * FILE_BYTES
        if size(volume.get("emptyDir", {}).get("sizeLimit", "0")) < needed:
            yield f"{path} has less room than {processes} spools and the logs of requests need: {needed} bytes"


def _room_problems(manifests: Manifests, pool: Pool, deployment: Document, processes: int) -> Iterator[str]:
    """A pod has a core for each gateway and for HAProxy, and room for what runs beside the gateways."""
    if processes * deployment["ray_actor_options"].get("num_cpus", 1) + HAPROXY_CPUS > pool.room["CPU"]:
        yield f"a pod of {pool.name} has no core for HAProxy beside {processes} gateways"
    others = [one for _, one in manifests.deployments() if one is not deployment and pool in manifests.pools_of(one)]
    for name, room in pool.room.items():
        asked = [asked_of(one).get(name, 0) for one in others]
        if processes * asked_of(deployment).get(name, 0) + sum(asked) > room + 1e-9:
            beside = ", ".join(one["name"] for one in others)
            yield f"a pod of {pool.name} with {processes} gateways has no room for {beside}: too little {name}"
