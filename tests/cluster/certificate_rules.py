"""TLS between the pods: each makes its certificate before Ray starts, and nothing else has the key of the authority."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from serve_app.cli.node_certificates import AUTHORITY, AUTHORITY_KEY, FILES

from .manifests import Document, Manifests, Pool

VARIABLES = ("RAY_USE_TLS", *FILES)
COMMAND = ["serve-app", "cluster", "node-certificate"]
# Where a variable has the addresses of its pod from.
ADDRESSES = ("status.podIP", "status.podIPs")
# KubeRay sets it in init containers; the head's name, which workers ask for.
HEAD_NAME = "FQ_RAY_IP"


def certificate_problems(manifests: Manifests) -> Iterator[str]:
    """All pods use TLS, or none does: in production all."""
    users = [pool for pool in manifests.pools if pool.env.get("RAY_USE_TLS", {}).get("value") == "1"]
    if not users and not manifests.production:
        return
    sources = {secret for pool in users if (secret := authority_of(pool)) is not None}
    for pool in manifests.pools:
        yield from (f"{pool.where}: {one}" for one in _pod_problems(pool))
        yield from (f"{pool.where}: {one}" for one in _leaks(pool, sources))
    yield from (f"RayService/serve-app autoscalerOptions: {one}" for one in _autoscaler_problems(manifests))
    if len(sources) > 1:
        yield f"RayService/serve-app: pods of several authorities can't talk to each other: {sorted(sources)}"
    for name in sources:
        secret = manifests.named("Secret", name)
        if secret is None or set(secret["stringData"]) != {AUTHORITY, AUTHORITY_KEY}:
            yield f"Secret/{name}: must be in the template, with {AUTHORITY} and {AUTHORITY_KEY}"


def maker_of(pool: Pool) -> Document | None:
    """The init container that makes the certificate."""
    return next((one for one in pool.init_containers if one.get("command", [])[:3] == COMMAND), None)


def option(maker: Document, name: str) -> str:
    """Returns the value of an option of the maker's command, or an empty string."""
    return next((one.partition("=")[2] for one in maker["command"] if one.startswith(f"{name}=")), "")


def authority_of(pool: Pool) -> str | None:
    """The Secret from which the pod's certificate is signed."""
    maker = maker_of(pool)
    volume = pool.mounts_of(maker).get(option(maker, "--authority"), {}) if maker else {}
    return volume.get("secret", {}).get("secretName")


def _pod_problems(pool: Pool) -> Iterator[str]:
    yield from _ray_problems(pool.env, pool.mounts)
    maker = maker_of(pool)
    if maker is None:
        yield f"no init container makes the pod's certificate (`{' '.join(COMMAND)}`)"
        return
    if maker["image"] != pool.container["image"]:
        yield "the certificate is made by another image than the pod's"
    mounts = pool.mounts_of(maker)
    to = mounts.get(option(maker, "--to"), {})
    ray = pool.mounts.get(_folder(pool.env), {})
    if to.get("name") is None or to["name"] != ray.get("name") or to["mount"].get("readOnly"):
        yield "the certificate is not written where Ray reads it"
    if authority_of(pool) is None:
        yield "--authority is no mounted Secret"
    fields = {one["name"]: one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for one in maker["env"]}
    named = {name for one in maker.get("args", []) for name in re.findall(r"\$\((\w+)\)", one)}
    if not any(fields.get(name) in ADDRESSES for name in named):
        yield f"the certificate is not for the pod's address ({' or '.join(ADDRESSES)})"
    if pool.role == "head" and HEAD_NAME not in named:
        yield f"the certificate is not for the head's name ({HEAD_NAME})"
    if pool.role != "head" and HEAD_NAME in named:
        yield "the certificate is for the head's name, so this pod could pass for the head"


def _ray_problems(env: dict[str, Document], mounts: dict[str, Document]) -> Iterator[str]:
    """Yields the problems of a container that talks to Ray."""
    if env.get("RAY_USE_TLS", {}).get("value") != "1":
        # Not through envFrom: the init container in which KubeRay waits for the head gets `env` alone.
        yield "RAY_USE_TLS is not 1"
    for name, file in FILES.items():
        path = PurePosixPath(env.get(name, {}).get("value", "/none"))
        if path.name != file or str(path.parent) != _folder(env):
            yield f"{name} is not the {file} of the pod's certificate"
    volume = mounts.get(_folder(env), {})
    if volume.get("emptyDir", {}).get("medium") != "Memory":
        yield "the key of the pod's certificate is not in memory"
    if not volume.get("mount", {}).get("readOnly"):
        yield "the pod's certificate is writable to Ray"


def _folder(env: dict[str, Document]) -> str:
    return str(PurePosixPath(env.get("RAY_TLS_SERVER_CERT", {}).get("value", "/none")).parent)


def _autoscaler_problems(manifests: Manifests) -> Iterator[str]:
    """KubeRay adds its container to the head's pod."""
    if not manifests.cluster.get("enableInTreeAutoscaling"):
        return
    options: dict[str, Any] = manifests.cluster.get("autoscalerOptions", {})
    head = manifests.pools[0]
    env = {one["name"]: one for one in options.get("env", [])}
    mounts = head.mounts_of(options)
    yield from _ray_problems(env, mounts)
    if mounts.get(_folder(env), {}).get("name") != head.mounts.get(_folder(head.env), {}).get("name"):
        yield "has another certificate than its pod"
    if any("secret" in volume for volume in mounts.values()):
        yield "has a Secret"


def _leaks(pool: Pool, authorities: set[str]) -> Iterator[str]:
    """Yields the containers, besides the maker, that have an authority's key. Its holder can pass for every node."""
    maker = maker_of(pool)
    for container in (*pool.init_containers, *pool.spec["containers"]):
        volumes = pool.mounts_of(container).values()
        found = {one["secret"]["secretName"] for one in volumes if "secret" in one}
        found |= {one["secretRef"]["name"] for one in container.get("envFrom", []) if "secretRef" in one}
        references = [one.get("valueFrom", {}).get("secretKeyRef") for one in container.get("env", [])]
        found |= {one["name"] for one in references if one}
        for name in sorted(found & authorities) if container is not maker else ():
            yield f"{container['name']} has the key of the authority, the Secret {name}"
