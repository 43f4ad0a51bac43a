"""Checks of the files in cluster/: functions from a parsed file to its problems; no problem means valid.

They are functions, so that the tests can also pass broken copies and check that the fault is found.
"""

from __future__ import annotations

import ast
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import ray.autoscaler
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig

from deployments import strict_config

REPOSITORY = Path(__file__).parents[2]
CLUSTER = REPOSITORY / "cluster"
KUBERNETES = "1.37"
# It would read its schemas, which are megabytes, for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

SECRETS = (
    "SERVE_APP_OPERATOR_KEY",
    "SERVE_APP_OPERATOR_KEY_PREVIOUS",
    "SERVE_APP_SECRET_KEY",
    "SERVE_APP_SECRET_KEY_PREVIOUS",
    "SERVE_APP_DATABASE_URL",
)
HARD_STOP, DRAIN = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
FLAGS = (
    "RAY_SERVE_ENABLE_HA_PROXY",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE",
    HARD_STOP,
    DRAIN,
    "RAY_SERVE_HAPROXY_MAXCONN",
    "RAY_SERVE_HAPROXY_RETRY_ON",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
)
READ = ("flags.env", "secrets.env", "private-tmp.sh")  # by the shell that starts Ray on a machine
MAX_SOCKET_PATH = 107  # bytes
MIN_DRIVER = 580  # for torch's CUDA 13 build

Document = dict[str, Any]


def read(name: str) -> Document:
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


def flags() -> dict[str, str]:
    """Returns the flags as bash reads them."""
    lines = (CLUSTER / "flags.env").read_text(encoding="utf-8").splitlines()
    given = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name: ast.literal_eval(value[1:]) if value.startswith("$'") else value for name, value in given}


def flag_problems(given: dict[str, str]) -> Iterator[str]:
    for name in FLAGS:
        if name not in given:
            yield f"{name} is missing"
    for name in FLAGS[:2]:
        if given.get(name, "1") != "1":
            yield f"{name} is off"


def schema_problems(document: Any, schema: Document) -> Iterator[str]:
    for error in jsonschema.Draft7Validator(schema).iter_errors(document):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


@cache
def launcher_schema() -> Document:
    path = Path(ray.autoscaler.__file__).parent / "ray-schema.json"
    return json.loads(path.read_text(encoding="utf-8"))


def deployments(serve: Document) -> list[Document]:
    return [deployment for application in serve["applications"] for deployment in application["deployments"]]


def serve_problems(serve: Document) -> list[str]:
    """The strict check of the service itself, and what a cluster asks beyond it."""
    problems = strict_config.find_problems(serve)
    if problems:
        return problems
    for deployment in deployments(serve):
        scaling = deployment.get("autoscaling_config")
        if scaling:
            # Ray's schema takes any mapping here and looks into it only when the deployment is made.
            problems += pydantic_problems(AutoscalingConfig, scaling, f"{deployment['name']}.autoscaling_config")
        # The service's scaling policy replaces Serve's delays.
        if scaling and "policy" not in scaling and scaling["downscale_delay_s"] < scaling["look_back_period_s"]:
            problems.append(f"{deployment['name']}: scales down before the look-back has passed, so it flaps")
        options = deployment.get("ray_actor_options", {})
        if not options.get("num_gpus") and not options.get("resources"):
            problems.append(f"{deployment['name']}: may run on the head or keep a GPU node busy")
    return problems


def asked_of(deployment: Document) -> dict[str, float]:
    """Returns Ray's resources that one replica takes."""
    options = deployment.get("ray_actor_options", {})
    return {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}


def places(deployment: Document, room: Mapping[str, float]) -> int:
    """Returns how many replicas of a deployment a pod or machine with these resources takes, beside nothing else."""
    # Ray counts in ten thousandths.
    fits = [math.floor(round(room.get(name, 0) / amount, 4)) for name, amount in asked_of(deployment).items() if amount]
    limit = deployment.get("max_replicas_per_node")
    return min([*fits, limit] if limit else fits, default=1)


def pydantic_problems(model: type[BaseModel], raw: object, where: str) -> list[str]:
    try:
        model.model_validate(raw)
    except ValidationError as error:
        return [f"{where}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
    return []


def kubernetes_problems(document: Document) -> Iterator[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"


def driver_problems(node: Document, document: Document) -> Iterator[str]:
    """A machine image says its driver in the name of its family (GCP) or not at all (AWS): then a command checks it."""
    images = [disk["initializeParams"].get("sourceImage", "") for disk in node.get("disks", [])]
    named = [int(found[1]) for image in images if (found := re.search(r"nvidia-(\d+)", image))]
    if images and not named:
        yield f"the machine image {images[0]} names no driver"
    for driver in named:
        if driver < MIN_DRIVER:
            yield f"the machine image has driver {driver}, and torch needs {MIN_DRIVER}"
    found = (re.search(r"driver_version.*-ge (\d+)", one) for one in document["setup_commands"])
    checked = [one[1] for one in found if one]
    if not checked or int(checked[0]) < MIN_DRIVER:
        yield f"no setup command checks that the driver is {MIN_DRIVER} or newer"


def private_tmp_problems(given: dict[str, str], folder: Path, installed: str) -> Iterator[str]:
    """Checks the environment that Ray starts with on a machine, for a `folder` that is at `installed` on a real one."""
    if given.get("RAY_TMPDIR") != str(folder):
        yield "Ray's folder is one that all users share"
    if stat.S_IMODE(folder.stat().st_mode) != 0o700:
        yield "other users may enter Ray's folder"
    for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_BASE", "SERVER_STATE_FILE"):
        path = given.get(f"RAY_SERVE_HAPROXY_{name}", "")
        if not Path(path).is_relative_to(folder):
            yield f"HAProxy's {name} is outside of it"
        # Serve adds the node's id, HAProxy a suffix while it replaces its own socket.
        elif len(path.replace(str(folder), installed)) + 57 + len(".1234567.tmp") > MAX_SOCKET_PATH:
            yield f"HAProxy's {name} has a path that is too long for a socket"


def launcher_problems(document: Document, given_flags: dict[str, str]) -> list[str]:
    """Ray's own schema, sizes that fit, and Ray started in a shell that has read the flags and the secrets."""
    problems = [*schema_problems(document, launcher_schema()), *flag_problems(given_flags)]
    if problems:
        return problems
    types = document["available_node_types"]
    if document["head_node_type"] not in types:
        problems.append("head_node_type: there is no such node type")
    if types.get(document["head_node_type"], {}).get("resources", {}).get("CPU") != 0:
        problems.append("the head offers CPUs, so replicas may run on it")
    for name, kind in types.items():
        if kind.get("min_workers", 0) > kind.get("max_workers", document["max_workers"]):
            problems.append(f"{name}: min_workers is above max_workers")
    if sum(kind.get("max_workers", 0) for kind in types.values()) > document["max_workers"]:
        problems.append("max_workers: does not hold all workers that the node types may have")
    if not any("GPU" in kind["resources"] for kind in types.values()):
        problems.append("no node type has a GPU")
    for name, kind in types.items():
        if "GPU" in kind["resources"]:
            problems += [f"{name}: {problem}" for problem in driver_problems(kind["node_config"], document)]
    for part in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in document[part] if "ray start" in command]
        if not starts:
            problems.append(f"{part}: does not start Ray")
        for command in starts:
            before = command.split("ray start")[0]
            problems += [f"{part}: {file} is not read" for file in READ if file not in before]
            if "set -a" not in before:
                problems.append(f"{part}: the variables are not exported")
    if not any("pip install" in command and "serve-app" in command for command in document["setup_commands"]):
        problems.append("setup_commands: the project is not installed")
    if not any(command.startswith("chmod 600") for command in document["setup_commands"]):
        problems.append("setup_commands: others may read the secrets")
    return problems
