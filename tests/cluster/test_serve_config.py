"""The Serve config of a cluster: it has no unknown key, because Ray would ignore one."""

from pathlib import Path

import pytest

from .checks import Document, read, serve_problems
from .mutate import REMOVED, broken, renamed

GATEWAY = "applications/0/deployments/0"
MODEL = "applications/1/deployments/0"


@pytest.fixture
def serve() -> Document:
    return read("serve-gpu.yaml")


def test_the_serve_configuration_is_valid(serve: Document) -> None:
    assert serve_problems(serve) == []


def test_the_configuration_offers_the_two_identifiers(serve: Document) -> None:
    assert set(serve["applications"][0]["deployments"][0]["user_config"]["models"]) == {"svc-chat", "svc-coder"}


def test_wrong_keys_are_counted_by_the_address_that_ingress_or_balancer_has_seen(serve: Document) -> None:
    assert serve["applications"][0]["deployments"][0]["user_config"]["trusted_proxies"] == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("http_options", "http_option"),
        ("http_options/port", "prot"),
        ("logging_config/encoding", "encodings"),
        ("applications/0/route_prefix", "route"),
        ("applications/1/args/max_running", "max_runing"),
        (f"{GATEWAY}/autoscaling_config/target_ongoing_requests", "target_requests"),
        (f"{GATEWAY}/max_ongoing_requests", "max_concurrent_queries"),
        (f"{GATEWAY}/user_config/models", "identifiers"),
        (f"{GATEWAY}/user_config/models/svc-chat/price/cached_input", "cached"),
        (f"{MODEL}/autoscaling_config/look_back_period_s", "look_back_s"),
        (f"{MODEL}/ray_actor_options/num_gpus", "gpus"),
        (f"{MODEL}/graceful_shutdown_timeout_s", "graceful_shutdown_timeout"),
    ],
)
def test_a_misspelt_key_is_found(serve: Document, path: str, name: str) -> None:
    problems = serve_problems(renamed(serve, path, name))
    assert any(name in problem or Path(path).name in problem for problem in problems)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("proxy_location", "Somewhere"),
        ("http_options/port", "eight thousand"),
        ("applications/0/import_path", REMOVED),
        ("applications/1/name", "gateway"),
        ("applications/1/args/dtype", "float16"),
        ("applications/1/args/kv_cache_memory", "lots"),
        ("applications/1/args/device_map", "auto"),
        (f"{MODEL}/ray_actor_options/runtime_env", REMOVED),
        (f"{GATEWAY}/name", "Gatewya"),
        (f"{GATEWAY}/num_replicas", 2),
        (f"{GATEWAY}/autoscaling_config/min_replicas", 0),
        (f"{GATEWAY}/autoscaling_config/min_replicas", 13),
        (f"{GATEWAY}/autoscaling_config/downscale_delay_s", 5),
        (f"{GATEWAY}/user_config/models/svc-chat/backends", {"qwen": 100}),
        (f"{GATEWAY}/user_config/models/svc-chat/price/input", "cheap"),
        (f"{GATEWAY}/ray_actor_options/resources", {}),
        (f"{MODEL}/ray_actor_options/num_gpus", -1),
        (f"{MODEL}/autoscaling_config/max_replicas", 0),
        (f"{MODEL}/autoscaling_config/downscale_delay_s", 10),
    ],
)
def test_a_wrong_value_is_found(serve: Document, path: str, value: object) -> None:
    assert serve_problems(broken(serve, path, value)) != []
