"""Rules for each pod of a set, by its role: functions from a pool to its problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .certificate_rules import authority_of
from .checks import DRAIN, FLAGS, flags
from .manifests import Document, Manifests, Pool, selects

# What the processes of a deployment need to know, and nobody else may.
SECRETS = {"Gateway": "serve-app-gateway", "Console": "serve-app-gateway", "Accounting": "serve-app-database"}
GPU = "nvidia.com/gpu"
HOST = "kubernetes.io/hostname"
PULL_SECRET = "serve-app-registry"


def problems(manifests: Manifests) -> Iterator[str]:
    for pool in manifests.pools:
        for rule in (flag_problems, security_problems, image_problems, room_problems, gpu_problems, volume_problems):
            yield from (f"{pool.where}: {problem}" for problem in rule(pool))
        yield from (f"{pool.where}: {problem}" for problem in secret_problems(pool, manifests))
    yield from apart_problems(manifests)
    yield from head_problems(manifests)


def flag_problems(pool: Pool) -> Iterator[str]:
    """Every node needs the flags of flags.env, with the same values, before `ray start`."""
    wanted = flags()
    for name in (*FLAGS, DRAIN):
        given = pool.env.get(name, {}).get("value")
        if given is None:
            yield f"{name} is missing"
        elif given != wanted[name] and name != DRAIN and not name.endswith("_S"):  # times have a rule of their own
            yield f"{name} is {given!r}, and in flags.env {wanted[name]!r}"


def security_problems(pool: Pool) -> Iterator[str]:
    if "prometheus.io/scrape" in pool.template["metadata"].get("annotations", {}):
        yield "Prometheus' operator ignores the annotation prometheus.io/scrape"
    yield from _confinement_problems(pool, pool.container)
    for one in pool.init_containers:
        yield from (f"{one['name']} {problem}" for problem in _confinement_problems(pool, one))


def _confinement_problems(pool: Pool, container: Document) -> Iterator[str]:
    pod, own = pool.spec.get("securityContext", {}), container.get("securityContext", {})
    both: Document = pod | own
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield "may run as root"
    if both.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "no seccomp profile"
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        yield "may gain privileges"
    if own.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "keeps capabilities"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "the root file system is writable"


def image_problems(pool: Pool) -> Iterator[str]:
    for container in (pool.container, *pool.init_containers):
        yield from image_problems_of(container["image"], pool.spec)


def image_problems_of(image: str, pod: Document) -> Iterator[str]:
    """Yields problems of an image of a pod: a tag can be moved to other contents while pods still start."""
    if not is_pinned(image):
        yield f"the image {image} is not pinned: name its digest"
    if pod.get("imagePullSecrets") != [{"name": PULL_SECRET}]:
        yield f"no imagePullSecrets: {PULL_SECRET}"


def is_pinned(image: str) -> bool:
    return bool(re.fullmatch(r"sha256:[0-9a-f]{64}", image.partition("@")[2]))


def room_problems(pool: Pool) -> Iterator[str]:
    for container in (pool.container, *pool.init_containers):
        resources = container.get("resources", {})
        for part in ("requests", "limits"):
            yield from (f"no {part} of {name}" for name in ("cpu", "memory") if name not in resources.get(part, {}))
    if pool.least > pool.most:
        yield f"minReplicas {pool.least} is above maxReplicas {pool.most}"


def gpu_problems(pool: Pool) -> Iterator[str]:
    """Pods of models go to machines with the right card; no other pod goes to a machine with a GPU."""
    tolerates = any(one.get("key") in (None, GPU) for one in pool.spec.get("tolerations", []))
    has_gpu = GPU in pool.container.get("resources", {}).get("limits", {})
    if pool.role != "model":
        if has_gpu or tolerates:
            yield f"a pod of {pool.role} may take a GPU, or a machine that has one"
        return
    if not has_gpu:
        yield "asks for no GPU"
    if not tolerates:
        yield f"no toleration of the taint {GPU}: it would never be scheduled"
    if not any("gpu" in key or "accelerator" in key for key in pool.spec.get("nodeSelector", {})):
        yield "no nodeSelector for the card: it may land on one that is too small"


def volume_problems(pool: Pool) -> Iterator[str]:
    mounts = pool.mounts
    for path, volume in mounts.items():
        if "name" not in volume:
            yield f"there is no volume for {path}"
    if mounts.get("/dev/shm", {}).get("emptyDir", {}).get("medium") != "Memory":
        yield "/dev/shm is not memory"
    home = pool.env.get("SERVE_APP_HOME", {}).get("value", "")
    for path in ("/tmp", home):
        if path not in mounts or mounts[path]["mount"].get("readOnly"):
            yield f"{path or 'SERVE_APP_HOME'} is not writable"


def secret_problems(pool: Pool, manifests: Manifests) -> Iterator[str]:
    """A pod has the Secrets of the deployments that it runs, the authority of its certificate, and no other."""
    runs = {one["name"].partition("-")[0] for _, one in manifests.deployments() if pool in manifests.pools_of(one)}
    wanted = {secret for deployment, secret in SECRETS.items() if deployment in runs}
    given = pool.sources("secret") - {authority_of(pool)}
    yield from (f"has the Secret {name}, which is for others" for name in sorted(given - wanted))
    yield from (f"lacks the Secret {name}" for name in sorted(wanted - given))
    for name in pool.env:
        if name != "SERVE_APP_HOME" and name.startswith(("SERVE_APP_", "PG")):
            yield f"{name} is in the manifest: it belongs into a Secret or ConfigMap"
    if ("serve-app-database" in pool.sources("configMap")) != ("Accounting" in runs):
        yield "the database's address is for the pods of accounting, and for these alone"
    if pool.role != "head" and pool.spec.get("automountServiceAccountToken") is not False:
        yield "has a token of Kubernetes' API"


def apart_problems(manifests: Manifests) -> Iterator[str]:
    """No two pods of gateways, and none of accounting, share a machine, but those of an old cluster may be there."""
    for role in ("gateway", "accounting"):
        pools = [pool for pool in manifests.pools if pool.role == role]
        for pool in pools:
            for other in pools:
                if pool is other and pool.most == 1:
                    continue
                terms = [one for one in _anti_affinity(pool) if selects(one["labelSelector"], other.labels)]
                if not terms:
                    yield f"{pool.where}: no hard anti-affinity to {other.name}: one machine could take both along"
                elif any("ray.io/cluster" not in one.get("matchLabelKeys", []) for one in terms):
                    yield f"{pool.where}: the anti-affinity also counts the pods of an old cluster"


def _anti_affinity(pool: Pool) -> list[Document]:
    affinity: dict[str, Any] = pool.spec.get("affinity", {}).get("podAntiAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    return [one for one in terms if one["topologyKey"] == HOST]


def head_problems(manifests: Manifests) -> Iterator[str]:
    """No replica runs on the head."""
    head = manifests.pools[0]
    if head.start.get("num-cpus") != "0":
        yield f"{head.where}: num-cpus is not 0: replicas may run on the head"
    for _, deployment in manifests.deployments():
        if head in manifests.pools_of(deployment):
            yield f"{head.where}: offers {sorted(head.offers)}, so {deployment['name']} may run on the head"
    if manifests.rayservice["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield f"{head.where}: excludeHeadPodFromServeSvc is not true: requests go to the head"
