"""Settings are checked strictly: an unknown key or a bad value names its path and stops."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import strict_config
from serve_app.settings import GatewaySettings, SettingsError, parse

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config() -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load((ROOT / "config.yaml").read_text()))


@pytest.mark.parametrize("path", ["config.yaml", "tests/service/config.yaml", "cluster/serve-gpu.yaml"])
def test_the_configs_of_the_project_are_sound(path: str) -> None:
    assert strict_config.load(ROOT / path)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("proxy_locations", "EveryNode", "proxy_locations: unknown key"),
        ("http_options.prot", 1, "http_options.prot: unknown key"),
        ("applications.0.args.curency", "USD", "applications.0.args.curency"),
        ("applications.0.args.currency", "dollars", "applications.0.args.currency"),
        ("applications.0.args.orphan_delay_s", 9, "lease_s must be at least 2 s above orphan_delay_s"),
        ("applications.0.deployments.0.num_replica", 1, "applications.0.deployments.0.num_replica: unknown key"),
        ("applications.0.deployments.0.user_config.models.svc-chat.price.input", "0.00001",
         "applications.0.deployments.0.user_config.models.svc-chat.price.input"),
        ("applications.0.deployments.0.user_config.models.svc-chat.backends.other", 1, "no application of that name"),
        ("applications.0.deployments.1.user_config.contract.rpm", 0,
         "applications.0.deployments.1.user_config.contract.rpm"),
        ("applications.1.args.max_runing", 1, "applications.1.args.max_runing"),
        ("applications.1.args.kv_cache_memory", "lots", "applications.1.args.kv_cache_memory"),
        ("applications.1.deployments.0.name", "Modell", "applications.1.deployments.0.name"),
        ("applications.1.deployments.0.autoscaling_config.max_replicas", 0, "autoscaling_config.max_replicas"),
        ("applications.1.deployments.0.ray_actor_options.num_cpu", 1, "ray_actor_options.num_cpu"),
    ],
)  # fmt: skip
def test_each_mistake_is_named_by_its_path(config: dict[str, Any], path: str, value: Any, told: str) -> None:
    *parents, last = path.split(".")
    place: Any = config
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    place[last] = value
    problems = strict_config.check(config)
    assert any(told in problem for problem in problems), problems


def test_a_gateway_needs_a_backend_with_a_weight() -> None:
    price = {"input": "0", "cached_input": "0", "output": "0"}
    with pytest.raises(SettingsError, match="weight above 0"):
        parse(GatewaySettings, {"models": {"svc-chat": {"backends": {"a": 0}, "price": price}}}, "user_config")


def test_a_price_written_as_a_yaml_number_is_what_was_written() -> None:
    price = {"input": 0.27, "cached_input": 0.07, "output": 1.1}
    settings = parse(GatewaySettings, {"models": {"svc-chat": {"backends": {"a": 1}, "price": price}}}, "user_config")
    assert settings.models["svc-chat"].price.price().input == 270
    assert settings.models["svc-chat"].price.price().output == 1100
