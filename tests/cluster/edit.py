"""Short ways to reach into a set of manifests, to break it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import yaml

from .checks import Document
from .manifests import Manifests


class Edit:
    """A copy of a set that a test may change."""

    def __init__(self, manifests: Manifests) -> None:
        self.documents = list(manifests.documents)
        self._production = manifests.production
        self._own: set[int] = set()  # objects that are copies already: to copy all takes most of a test's time

    def result(self) -> Manifests:
        return Manifests(self.documents, self._production)

    def of(self, kind: str, name: str = "serve-app") -> Document:
        index = self._index(kind, name)
        if index not in self._own:
            self._own.add(index)
            self.documents[index] = copy.deepcopy(self.documents[index])
        return self.documents[index]

    def remove(self, kind: str, name: str = "serve-app") -> None:
        """As the only change: the copies are known by their position."""
        del self.documents[self._index(kind, name)]

    def _index(self, kind: str, name: str) -> int:
        names = [(one["kind"], one["metadata"]["name"]) for one in self.documents]
        return names.index((kind, name))

    def group(self, name: str) -> Document:
        cluster = self.of("RayService")["spec"]["rayClusterConfig"]
        if name == "head":
            return cluster["headGroupSpec"]
        return next(one for one in cluster["workerGroupSpecs"] if one["groupName"] == name)

    def pod(self, name: str) -> Document:
        return self.group(name)["template"]["spec"]

    def container(self, name: str) -> Document:
        return self.pod(name)["containers"][0]

    def certificate(self, name: str) -> Document:
        """The init container that makes the certificate of a pod."""
        return self.pod(name)["initContainers"][0]

    def mount(self, name: str, volume: str) -> Document:
        """Returns the mount of a volume in Ray's container."""
        return next(one for one in self.container(name)["volumeMounts"] if one["name"] == volume)

    def port(self, name: str, port: str) -> Document:
        """Returns a named port of Ray's container."""
        return next(one for one in self.container(name)["ports"] if one["name"] == port)

    def set_env(self, name: str, variable: str, value: str | None) -> None:
        """None removes it."""
        env = self.container(name)["env"]
        env[:] = [one for one in env if one["name"] != variable]
        if value is not None:
            env.append({"name": variable, "value": value})

    def volume(self, name: str, volume: str, source: Document) -> None:
        """Replaces a volume's source."""
        volumes = self.pod(name)["volumes"]
        volumes[:] = [one if one["name"] != volume else {"name": volume, **source} for one in volumes]

    def url(self, before: str, after: str) -> None:
        data = self.of("ConfigMap", "serve-app-database")["data"]
        assert before in data["SERVE_APP_DATABASE_URL"]
        data["SERVE_APP_DATABASE_URL"] = data["SERVE_APP_DATABASE_URL"].replace(before, after)

    def serve(self, change: Callable[[Any], None]) -> None:
        """Changes the Serve config inside the RayService."""
        spec = self.of("RayService")["spec"]
        config = yaml.safe_load(spec["serveConfigV2"])
        change(config)
        spec["serveConfigV2"] = yaml.safe_dump(config)

    def deployment(self, name: str, **values: object) -> None:
        """Sets options of all deployments of this name."""

        def change(config: Any) -> None:
            for application in config["applications"]:
                for one in application["deployments"]:
                    if one["name"] == name:
                        one |= values

        self.serve(change)

    def backend(self, name: str, change: Callable[[Any], object]) -> None:
        """Changes one application of the Serve config."""
        self.serve(lambda config: [change(one) for one in config["applications"] if one["name"] == name])


def on_gpus(backend: Any, number: int) -> None:
    """Gives each replica of a vLLM backend this number of GPUs."""
    backend["args"]["vllm"] = {"tensor_parallel_size": number}
    backend["deployments"][0]["ray_actor_options"]["num_gpus"] = number
