"""Strict validation of a Serve config file: Ray itself ignores keys that it does not know.

Walks the fields of Ray's own schema, then validates builder arguments and user_config with the settings of serve_app.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from serve_app.gateway.shards import shard_name
from serve_app.settings import GatewayArgs, GatewaySettings, LimiterSettings, ModelArgs, SettingsError, parse

BUILDER_ARGS: dict[str, type[BaseModel]] = {
    "serve_app.apps:gateway": GatewayArgs,
    "serve_app.apps:model": ModelArgs,
}
USER_CONFIGS: dict[str, type[BaseModel]] = {"Gateway": GatewaySettings, "Limiter": LimiterSettings}


def load(path: Path) -> dict[str, Any]:
    """The config file at `path`. Raises SettingsError that names each problem's path, one a line."""
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise SettingsError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    problems = check(raw)
    if problems:
        raise SettingsError("\n".join(f"{path}: {problem}" for problem in problems))
    config: dict[str, Any] = raw
    return config


def check(raw: Any) -> list[str]:
    """All problems of a parsed config, each beginning with its path; empty when it is sound."""
    if not isinstance(raw, dict):
        return ["must be a mapping with `applications`"]
    problems = list(unknown_keys(raw, ServeDeploySchema, ""))
    try:
        ServeDeploySchema.model_validate(raw)
    except ValidationError as error:
        problems += [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_context=False)
        ]
        return problems
    for index, application in enumerate(raw["applications"]):
        where = f"applications.{index}"
        builder = application["import_path"]
        if builder in BUILDER_ARGS:
            problems += _problems(BUILDER_ARGS[builder], application.get("args") or {}, f"{where}.args")
        for position, deployment in enumerate(application.get("deployments") or []):
            path = f"{where}.deployments.{position}"
            name = deployment["name"]
            if name == "Gateway" and application.get("name") != "gateway":
                problems.append(f"{where}.name: must be 'gateway': replicas find the ledger under this name")
            known = _deployments(builder, application.get("args"))
            kind = USER_CONFIGS.get(name.partition("-")[0])
            if known is not None and name not in known:
                problems.append(f"{path}.name: {name!r} is not one of {', '.join(known)}")
            elif known is not None and kind is not None and deployment.get("user_config") is not None:
                problems += _problems(kind, deployment["user_config"], f"{path}.user_config")
            if isinstance(scaling := deployment.get("autoscaling_config"), dict):
                # Ray's schema takes any mapping here and looks into it only when the deployment is made.
                problems += _problems(AutoscalingConfig, scaling, f"{path}.autoscaling_config")
        if builder == "serve_app.apps:gateway":
            problems += _unlike_shards(application, where)
    return problems + _dangling_backends(raw["applications"])


def _deployments(builder: str, args: Any) -> list[str] | None:
    """Names of a builder's deployments; None for one that is not ours."""
    if builder == "serve_app.apps:gateway":
        return ["Gateway", *_shards("Limiter", args), *_shards("Accounting", args)]
    return ["Model"] if builder == "serve_app.apps:model" else None


def _shards(deployment: str, args: Any) -> list[str]:
    count = args.get(f"{deployment.lower()}_shards", 1) if isinstance(args, dict) else 1
    return [shard_name(deployment, index) for index in range(count if isinstance(count, int) else 1)]


def _unlike_shards(application: dict[str, Any], where: str) -> list[str]:
    """Limiter shards whose settings differ: an account's limits would depend on its id."""
    found = {one["name"]: one.get("user_config") for one in application.get("deployments") or []}
    return [
        f"{where}.deployments: {name} needs the same user_config as Limiter (a YAML anchor saves writing it twice)"
        for name in _shards("Limiter", application.get("args"))
        if found.get(name) != found.get("Limiter")
    ]


def _problems(kind: type[BaseModel], raw: Any, where: str) -> list[str]:
    try:
        parse(kind, raw, where)
    except SettingsError as error:
        return str(error).splitlines()
    return []


def _dangling_backends(applications: list[dict[str, Any]]) -> list[str]:
    """Identifiers that are mapped to an application which the file does not declare."""
    names = {application.get("name", "default") for application in applications}
    problems = []
    for index, application in enumerate(applications):
        for position, deployment in enumerate(application.get("deployments") or []):
            models = (deployment.get("user_config") or {}).get("models")
            if deployment["name"] != "Gateway" or not isinstance(models, dict):
                continue
            for identifier, model in models.items():
                backends = model.get("backends") if isinstance(model, dict) else None
                for backend in backends if isinstance(backends, dict) else ():
                    if backend not in names:
                        problems.append(
                            f"applications.{index}.deployments.{position}.user_config.models.{identifier}.backends."
                            f"{backend}: no application of that name; there are {', '.join(sorted(names))}"
                        )
    return problems


def unknown_keys(raw: Any, schema: Any, path: str) -> typing.Iterator[str]:
    """Keys of `raw` that the pydantic model `schema` has no field for, by path. Free-form mappings are not entered."""
    for model in _models_of(schema):
        if isinstance(raw, dict):
            fields = {
                alias: field for name, field in model.model_fields.items() for alias in {name, field.alias or name}
            }
            for key, value in raw.items():
                where = f"{path}.{key}" if path else str(key)
                if key not in fields:
                    yield f"{where}: unknown key"
                else:
                    yield from unknown_keys(value, fields[key].annotation, where)
        return
    if isinstance(raw, list):
        inner = _item_of(schema)
        for index, item in enumerate(raw):
            yield from unknown_keys(item, inner, f"{path}.{index}")


def _models_of(schema: Any) -> list[type[BaseModel]]:
    """The pydantic models that an annotation allows, looking through Optional and unions."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return [schema]
    if typing.get_origin(schema) in (list, dict, tuple):
        return []
    return [model for part in typing.get_args(schema) for model in _models_of(part)]


def _item_of(schema: Any) -> Any:
    if typing.get_origin(schema) is list:
        return typing.get_args(schema)[0]
    for part in typing.get_args(schema):
        if (item := _item_of(part)) is not None:
            return item
    return None
