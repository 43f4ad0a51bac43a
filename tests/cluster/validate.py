"""All problems of a set of manifests, each beginning with its object: `Kind/name`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

from . import crds
from .certificate_rules import certificate_problems
from .checks import Document, kubernetes_problems, serve_problems
from .gateway_rules import gateway_problems
from .manifests import Manifests, parsed
from .network_rules import monitor_problems, policy_problems, route_problems
from .placement_rules import (
    cache_problems,
    memory_problems,
    priority_problems,
    secret_store_problems,
    spot_problems,
    zero_problems,
    zone_problems,
)
from .pod_rules import image_problems_of
from .pod_rules import problems as pod_problems
from .set_rules import (
    budget_problems,
    database_problems,
    redis_problems,
    replica_problems,
    storage_problems,
    time_problems,
    version_problems,
)

CLUSTER_WIDE = ("Namespace", "PriorityClass")
RULES = (
    pod_problems,
    certificate_problems,
    version_problems,
    replica_problems,
    gateway_problems,
    time_problems,
    database_problems,
    redis_problems,
    storage_problems,
    budget_problems,
    policy_problems,
    route_problems,
    monitor_problems,
    priority_problems,
    zone_problems,
    spot_problems,
    memory_problems,
    cache_problems,
    zero_problems,
    secret_store_problems,
)


def problems(manifests: Manifests, *, formed: str = "") -> list[str]:
    """First each object by itself; what they must be to each other only if each has the right form.

    Objects of the kind `formed` have it: the schema of a RayService takes longer than all other checks.
    """
    objects = [document for document in manifests.documents if document["kind"] != formed]
    found = [one for document in objects for one in object_problems(document)]
    namespace = manifests.of("Namespace")[0]["metadata"]["name"]
    for document in manifests.documents:
        if document["kind"] not in CLUSTER_WIDE and document["metadata"].get("namespace") != namespace:
            found.append(f"{_name(document)}: is not in the namespace {namespace}")
    if found:
        return found
    text = manifests.rayservice["spec"]["serveConfigV2"]
    found = [f"RayService/serve-app serveConfigV2.{one}" for one in _serve_problems(text)]
    return found or [one for rule in RULES for one in rule(manifests)]


def object_problems(document: Document) -> list[str]:
    return [f"{_name(document)}: {one}" for one in _cached(json.dumps(document))]


def _name(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


@cache
def _serve_problems(text: str) -> list[str]:
    return serve_problems(parsed(text))


# Most objects are the same in most tests.
@cache
def _cached(text: str) -> list[str]:
    document = json.loads(text)
    if crds.is_custom(document):
        found = crds.problems(document)
        pods = _pods(document) if document["kind"] == "RayService" and not found else ()
        return found + [one for pod in pods for one in _cached(json.dumps(pod))]
    found = list(kubernetes_problems(document))
    if document["kind"] == "Job" and not found:
        pod = document["spec"]["template"]["spec"]
        found += image_problems_of(pod["containers"][0]["image"], pod)
    return found


def _pods(document: Document) -> Iterator[Document]:
    cluster = document["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "Pod", **group["template"]}
