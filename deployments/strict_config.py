"""Validates a Serve config file strictly against Ray's schema and serve_app.settings. Ray ignores unknown keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from deployments import placement_groups
from serve_app.contracts.calls import shard_name
from serve_app.engine.engines import ENGINES
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings
from serve_app.scaling.scaling_settings import ScalingSettings
from serve_app.settings import (
    ConsoleArgs,
    GatewayArgs,
    GatewaySettings,
    LimiterSettings,
    ModelArgs,
    ModelSettings,
    SettingsError,
    parse,
    problem_lines,
    read_config,
)
from serve_app.times import (
    DRAIN,
    GATEWAY_STOPS_S,
    HARD_STOP,
    MODEL_STOPS_S,
    STOPS,
    Part,
    chain_problems,
    longest_reply_s,
)

GATEWAY, MODEL, CONSOLE = (f"deployments.apps:{builder}" for builder in ("gateway", "model", "console"))
POLICY = "deployments.autoscaling:ScalingPolicy"
BUILDER_ARGS: dict[str, type[BaseModel]] = {GATEWAY: GatewayArgs, MODEL: ModelArgs, CONSOLE: ConsoleArgs}
ONLY = {MODEL: "Model", CONSOLE: "Console"}  # the deployment of an application that has only one
USER_CONFIGS: dict[str, type[BaseModel]] = {
    "Gateway": GatewaySettings,
    "Limiter": LimiterSettings,
    "Model": ModelSettings,
}


def load_config(path: Path) -> dict[str, Any]:
    """Loads the config file at `path`. Raises SettingsError that names each problem's path, one per line."""
    config = read_config(path)
    if problems := find_problems(config) or list(time_problems(config, os.environ)):
        raise SettingsError("\n".join(f"{path}: {problem}" for problem in problems))
    return config


def find_problems(config: dict[str, Any]) -> list[str]:
    """Returns all problems. Each begins with its path."""
    problems = []
    try:
        ServeDeploySchema.model_validate(config, extra="forbid")
    except ValidationError as error:
        problems = problem_lines(error)
        if any(problem["type"] != "extra_forbidden" for problem in error.errors()):
            return problems
    names = {name for application in config["applications"] for name in _backend_names(application)}
    for index, application in enumerate(config["applications"]):
        problems += _application_problems(application, f"applications.{index}", names)
    return problems


def time_problems(config: dict[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """Yields the timeouts of a valid config, or of this machine's environment, that are too short for a long reply."""
    longest: list[Part] = []
    stops: dict[str, list[Part]] = {MODEL: [], GATEWAY: []}
    for index, application in enumerate(config["applications"]):
        if (builder := application["import_path"]) not in stops:
            continue
        name, default = ("Gateway", GATEWAY_STOPS_S) if builder == GATEWAY else ("Model", MODEL_STOPS_S)
        named: dict[str, tuple[int, dict[str, Any]]]
        named = {one["name"]: (number, one) for number, one in enumerate(application.get("deployments") or [])}
        number, deployment = named.get(name, (-1, {}))
        where = f"applications.{index}" + (f" ({name})." if number < 0 else f".deployments.{number}.")
        stops[builder].append(Part(where + STOPS, deployment.get(STOPS, default)))
        if name == "Gateway":
            longest.append(Part("the longest reply", longest_reply_s(deployment.get("user_config") or {})))
    flags = []
    for name in (HARD_STOP, DRAIN):
        try:
            flags += [[Part(name, float(environment[name]))]] if name in environment else []
        except ValueError:
            yield f"{name} must be a number of seconds, not {environment[name]!r}"
    yield from chain_problems([longest, stops[MODEL], stops[GATEWAY], *flags])


def _application_problems(application: dict[str, Any], where: str, names: set[str]) -> Iterator[str]:
    builder, args = application["import_path"], application.get("args") or {}
    deployments: list[dict[str, Any]] = application.get("deployments") or []
    expected = ["Gateway", *_shards("Limiter", args), *_shards("Accounting", args)]
    if builder in ONLY:
        expected = [ONLY[builder]]
    if builder in BUILDER_ARGS:
        yield from _setting_problems(BUILDER_ARGS[builder], args, f"{where}.args")
    for index, deployment in enumerate(deployments):
        name, path = deployment["name"], f"{where}.deployments.{index}"
        user_config, settings = deployment.get("user_config"), USER_CONFIGS.get(name.partition("-")[0])
        if name == "Gateway":
            if application.get("name") != "gateway":
                yield f"{where}.name: must be 'gateway': replicas find the ledger under this name"
            yield from _unknown_backends(user_config, f"{path}.user_config.models", names)
        if builder in BUILDER_ARGS and name not in expected:
            yield f"{path}.name: {name!r} is not one of {', '.join(expected)}"
        elif builder in BUILDER_ARGS and settings is not None and user_config is not None:
            yield from _setting_problems(settings, user_config, f"{path}.user_config")
        if isinstance(scaling := deployment.get("autoscaling_config"), dict):
            # Ray's schema accepts any mapping here; Ray validates it only when it creates the deployment.
            yield from _setting_problems(AutoscalingConfig, scaling, f"{path}.autoscaling_config")
            yield from _policy_problems(scaling, f"{path}.autoscaling_config")
        if builder == GATEWAY:
            yield from _replica_problems(deployment, path)
        if builder == CONSOLE and deployment.get("num_replicas", 1) != 1:
            yield f"{path}.num_replicas: must be 1: one process counts the attempts to sign in"
        if builder == MODEL:
            yield from _adapter_problems(args, user_config, f"{path}.user_config.adapters")
            yield from _interpreter_problems(application, deployment, f"{path}.ray_actor_options")
            yield from _gpu_problems(args, deployment, path)
    if builder == GATEWAY:
        # If limiter shards had different settings, an account's limits would depend on its id.
        user_configs = {deployment["name"]: deployment.get("user_config") for deployment in deployments}
        for name in _shards("Limiter", args):
            if user_configs.get(name) != user_configs.get("Limiter"):
                yield (
                    f"{where}.deployments: {name} needs the same user_config as Limiter "
                    "(a YAML anchor saves writing it twice)"
                )


def _replica_problems(deployment: dict[str, Any], where: str) -> Iterator[str]:
    """Checks the number of processes: at least one gateway, and exactly one of each shard."""
    name, scaling = deployment["name"], deployment.get("autoscaling_config")
    if name == "Gateway":
        if isinstance(scaling, dict) and scaling.get("min_replicas") == 0:
            yield f"{where}.autoscaling_config.min_replicas: must be at least 1: a request can't start a gateway"
    elif scaling is not None or deployment.get("num_replicas") not in (None, 1):
        yield f"{where}: a shard is one process: leave num_replicas at 1, and raise limiter_shards or accounting_shards"


def _backend_names(application: dict[str, Any]) -> Iterator[str]:
    """Yields the names that an identifier's `backends` may use: the application, and each of its adapters."""
    name = application.get("name", "default")
    yield name
    for deployment in application.get("deployments") or ():
        yield from (f"{name}:{adapter}" for adapter in _adapters(deployment.get("user_config")))


def _adapters(user_config: Any) -> dict[str, Any]:
    adapters = user_config.get("adapters") if isinstance(user_config, dict) else None
    return adapters if isinstance(adapters, dict) else {}


def _adapter_problems(args: Any, user_config: Any, where: str) -> Iterator[str]:
    """Checks that a replica has room for the adapters."""
    adapters = _adapters(user_config)
    try:
        room = parse(ModelArgs, args, "").max_adapters
    except SettingsError:
        return  # the error in `args` was reported before
    if adapters and not room:
        yield f"{where}: needs engine: vllm and vllm.max_loras, the number of adapters on the GPU"
    elif len(adapters) > room:
        yield f"{where}: {len(adapters)} adapters, and {room} may be loaded: raise vllm.max_cpu_loras"


def _shards(deployment: str, args: Any) -> list[str]:
    count = args.get(f"{deployment.lower()}_shards", 1) if isinstance(args, dict) else 1
    return [shard_name(deployment, index) for index in range(count if isinstance(count, int) else 1)]


def _setting_problems(kind: type[BaseModel], raw: Any, where: str) -> list[str]:
    try:
        parse(kind, raw, where)
    except SettingsError as error:
        return str(error).splitlines()
    return []


def _policy_problems(scaling: dict[str, Any], where: str) -> Iterator[str]:
    """Checks the settings of `POLICY`, which Serve reads only when it creates the deployment."""
    policy = scaling.get("policy")
    if not isinstance(policy, dict) or policy.get("policy_function") != POLICY:
        return
    yield from _setting_problems(ScalingSettings, policy.get("policy_kwargs") or {}, f"{where}.policy.policy_kwargs")
    for delay in ("upscale_delay_s", "downscale_delay_s"):
        if scaling.get(delay) != 0:
            yield f"{where}.{delay}: must be 0 with this policy, which has separate delays: smooth_s, down_after_s"


def _interpreter_problems(application: dict[str, Any], deployment: dict[str, Any], where: str) -> Iterator[str]:
    """Checks that ray_actor_options in the file, which replace those of the code, name the engine's interpreter."""
    options, args = deployment.get("ray_actor_options"), application.get("args")
    engine = ENGINES.get(args.get("engine", "native")) if isinstance(args, dict) else None
    if not isinstance(options, dict) or not isinstance(args, dict) or engine is None or engine.python() is None:
        return
    environments = (options.get("runtime_env"), application.get("runtime_env"))
    if not any(isinstance(one, dict) and "py_executable" in one for one in environments):
        python = args.get("interpreter") or f"the Python of {args['engine']}'s environment"
        yield f"{where}: these replace the engine's interpreter: add runtime_env: {{py_executable: {python}}}"


def _gpu_problems(args: Any, deployment: dict[str, Any], where: str) -> Iterator[str]:
    """Checks that a vLLM replica gets the GPUs that its parallel sizes need."""
    if not isinstance(args, dict) or args.get("engine") != "vllm":
        return
    try:
        options = parse(VllmSettings, args.get("vllm") or {}, where)
    except SettingsError:
        return  # reported with the other settings
    yield from placement_groups.find_problems(
        options.tensor_parallel_size, options.pipeline_parallel_size, deployment, where
    )


def _unknown_backends(user_config: Any, where: str, names: set[str]) -> Iterator[str]:
    """Yields the identifiers' backends for which the file has no application."""
    models = (user_config or {}).get("models")
    for identifier, model in models.items() if isinstance(models, dict) else ():
        backends, fallback = (model.get("backends"), model.get("fallback")) if isinstance(model, dict) else (None, None)
        named = [f"backends.{backend}" for backend in (backends if isinstance(backends, dict) else ())]
        named += [f"fallback.{fallback}"] if isinstance(fallback, str) else []
        for path in named:
            if path.partition(".")[2] not in names:
                there = ", ".join(sorted(names))
                yield f"{where}.{identifier}.{path}: no application of that name; available: {there}"
