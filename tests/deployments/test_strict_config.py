"""A wrong config is refused; each problem is named by its path."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import strict_config
from serve_app.settings import SettingsError

ROOT = Path(__file__).parents[2]
GOOD = yaml.safe_load((ROOT / "config.yaml").read_text())


def changed(path: str, value: Any) -> dict[str, Any]:
    """The dev config with one value replaced; the last part of `path` may be new."""
    config = copy.deepcopy(GOOD)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = config
    for part in parents:
        place = place[part]
    place[last] = value
    return config


@pytest.mark.parametrize(
    "file",
    [
        "config.yaml",
        "tests/service/config.yaml",
        "tests/service/lifecycle.yaml",
        "tests/service/autoscaling.yaml",
        "tests/service/vllm.yaml",
        "cluster/serve-gpu.yaml",
    ],
)
def test_our_own_files_are_valid(file: str) -> None:
    assert strict_config.load_config(ROOT / file)["applications"]


MODELS = "applications.0.deployments.0.user_config.models"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("htp_options", {}),
        ("http_options.prot", 1),
        ("http_options.port", "many"),
        ("applications.0.arguments", {}),
        ("applications.0.args.curency", "USD"),
        ("applications.0.args.currency", "dollars"),
        ("applications.0.args.lease_s", 0),
        ("applications.1.args.modle", "x"),
        ("applications.1.args.kv_cache_memory", "lots"),
        ("applications.0.deployments.0.num_replica", 2),
        ("applications.0.deployments.0.user_config.keep_alive", 1),
        ("applications.0.deployments.0.user_config.settle_timeout_s", -1),
        ("applications.0.deployments.1.user_config.contract.rpm", 0),
        ("applications.1.deployments.0.autoscaling_config.max_replica", 2),
        ("applications.1.deployments.0.autoscaling_config.max_replicas", 0),
        ("applications.1.deployments.0.autoscaling_config.max_replicas", -2),
        ("applications.1.deployments.0.ray_actor_options.num_cpu", 1),
        (f"{MODELS}.svc-chat.backend", {}),
        (f"{MODELS}.svc-chat.price.input", "0.0001"),
        (f"{MODELS}.svc-chat.price.output", "-1"),
        (f"{MODELS}.svc-chat.backends.smollm2", -1),
    ],
)
def test_an_unknown_key_and_a_bad_value_are_named_by_path(path: str, value: Any) -> None:
    problems = strict_config.find_problems(changed(path, value))
    assert problems
    assert any(path in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("proxy_locations", "EveryNode", "proxy_locations: unknown key"),
        ("http_options.prot", 1, "http_options.prot: unknown key"),
        ("applications.0.args.curency", "USD", "applications.0.args.curency: unknown key"),
        ("applications.0.deployments.1.user_config.pressure.gain", 1, "user_config.pressure.gain: unknown key"),
        ("applications.0.deployments.1.user_config.pressure.floor", 2, "user_config.pressure.floor: "),
        ("applications.0.args.orphan_delay_s", 9, "lease_s must be at least 2 s above orphan_delay_s"),
        (f"{MODELS}.svc-chat.backends.other", 1, "no application of that name"),
        (f"{MODELS}.svc-chat.fallback", "other", "svc-chat.fallback.other: no application of that name"),
    ],
)
def test_a_problem_says_what_is_wrong(path: str, value: Any, problem: str) -> None:
    assert any(problem in found for found in strict_config.find_problems(changed(path, value)))


def with_adapters(adapters: dict[str, str], **args: Any) -> dict[str, Any]:
    config = changed("applications.1.args", args)
    [deployment] = config["applications"][1]["deployments"]
    del deployment["ray_actor_options"]
    deployment["user_config"] = {"adapters": adapters}
    return config


@pytest.mark.parametrize(
    ("adapters", "args", "problem"),
    [
        ({"a": "x"}, {}, "needs engine: vllm and vllm.max_loras"),
        ({"a": "x"}, {"engine": "vllm"}, "needs engine: vllm and vllm.max_loras"),
        (
            {"a": "x", "b": "x", "c": "x"},
            {"engine": "vllm", "vllm": {"max_loras": 2}},
            "3 adapters, and 2 may be loaded: raise vllm.max_cpu_loras",
        ),
        ({"a:b": "x"}, {"engine": "vllm", "vllm": {"max_loras": 2}}, "user_config.adapters.a:b"),
    ],
)
def test_adapters_that_no_replica_can_hold_are_refused(
    adapters: dict[str, str], args: dict[str, Any], problem: str
) -> None:
    [found] = strict_config.find_problems(with_adapters(adapters, model="m", **args))
    assert found.startswith("applications.1.deployments.0.user_config.adapters")
    assert problem in found


def test_adapters_of_a_backend_may_be_named_and_others_may_not() -> None:
    config = with_adapters({"law": "/models/law"}, model="m", engine="vllm", vllm={"max_loras": 1})
    config["applications"][0]["deployments"][0]["user_config"]["models"]["svc-chat"]["backends"] = {
        "smollm2:law": 1,
        "smollm2:medicine": 1,
    }
    [problem] = strict_config.find_problems(config)
    assert "svc-chat.backends.smollm2:medicine: no application of that name; available:" in problem
    assert "smollm2:law" in problem


def test_resources_of_a_vllm_backend_must_name_its_interpreter() -> None:
    config = changed("applications.1.args", {"model": "m", "engine": "vllm"})
    [problem] = strict_config.find_problems(config)
    assert problem.startswith("applications.1.deployments.0.ray_actor_options: ")
    assert "runtime_env: {py_executable:" in problem
    options = config["applications"][1]["deployments"][0]["ray_actor_options"]
    options["runtime_env"] = {"py_executable": "/home/ray/vllm/bin/python"}
    assert strict_config.find_problems(config) == []


def test_an_unknown_key_does_not_hide_other_problems() -> None:
    config = changed("htp_options", {})
    config["applications"][0]["args"]["currency"] = "dollars"
    assert len(strict_config.find_problems(config)) == 2


@pytest.mark.parametrize(
    ("console", "problem"),
    [
        ({"args": {"shards": 2}}, "applications.2.args.shards: unknown key"),
        ({"deployments": [{"name": "Pages"}]}, "applications.2.deployments.0.name: 'Pages' is not one of Console"),
        (
            {"deployments": [{"name": "Console", "num_replicas": 2}]},
            "applications.2.deployments.0.num_replicas: must be 1",
        ),
    ],
)
def test_a_console_has_one_process_and_its_own_settings(console: dict[str, Any], problem: str) -> None:
    *others, base = GOOD["applications"]
    assert base["name"] == "console"
    config = {**GOOD, "applications": [*others, base | console]}
    [found] = strict_config.find_problems(config)
    assert problem in found
    assert not strict_config.find_problems(GOOD)


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (f"{MODELS}.svc-chat.backends", {"smollm2": 1, "nowhere": 1}, f"{MODELS}.svc-chat.backends.nowhere"),
        (f"{MODELS}.svc-chat.backends", {"smollm2": 0}, f"{MODELS}.svc-chat"),
        (f"{MODELS}.svc-chat.backends", [{"smollm2": 1}], f"{MODELS}.svc-chat.backends"),
        (f"{MODELS}.svc-chat.backends", "smollm2", f"{MODELS}.svc-chat.backends"),
        (f"{MODELS}.svc-chat", None, f"{MODELS}.svc-chat"),
        (MODELS, {}, MODELS),
        ("applications.0.deployments.0.name", "Gatewya", "applications.0.deployments.0.name"),
        ("applications.1.deployments.0.name", "Modell", "applications.1.deployments.0.name"),
        ("applications.0.name", "front", "applications.0.name"),
        ("applications", None, "applications"),
    ],
)
def test_a_problem_that_would_only_show_at_run_time_is_named(path: str, value: Any, where: str) -> None:
    problems = strict_config.find_problems(changed(path, value))
    assert any(problem.startswith(where) for problem in problems), problems


@pytest.mark.parametrize("content", ["", "[]", "text", "a: [", "\t", "applications: 5"])
def test_a_file_that_is_no_config_is_one_readable_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"config\.yaml"):
        strict_config.load_config(path)


def test_files_that_cannot_be_read_are_one_readable_error(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(SettingsError, match=path.name):
            strict_config.load_config(path)


def sharded(*names: str, **args: int) -> dict[str, Any]:
    """The dev config with these limiter shards listed, each with the settings of the first."""
    config = changed("applications.0.args", {"currency": "USD", **args})
    deployments = config["applications"][0]["deployments"]
    limiter = next(one for one in deployments if one["name"] == "Limiter")
    deployments += [{**limiter, "name": name} for name in names]
    return config


def test_shards_are_listed_by_their_names_and_with_the_settings_of_the_first() -> None:
    assert strict_config.find_problems(sharded("Limiter-1", "Limiter-2", limiter_shards=3, accounting_shards=2)) == []
    [problem] = strict_config.find_problems(sharded("Limiter-1", limiter_shards=3))
    assert "Limiter-2 needs the same user_config as Limiter" in problem
    config = sharded("Limiter-1", limiter_shards=2)
    config["applications"][0]["deployments"][-1]["user_config"] = {"contract": {"rpm": 1}}
    [problem] = strict_config.find_problems(config)
    assert "Limiter-1 needs the same user_config as Limiter" in problem


def test_a_shard_that_the_number_of_shards_leaves_out_is_named() -> None:
    [problem] = strict_config.find_problems(sharded("Limiter-1"))
    assert "'Limiter-1' is not one of Gateway, Limiter, Accounting" in problem


AUTOSCALING = "applications.1.deployments.0.autoscaling_config"
OURS = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 0}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policy_kwargs": {"fil": 1}}, "policy.policy_kwargs.fil: unknown key"),
        ({"policy_kwargs": {"fill": 2}}, "policy.policy_kwargs.fill: "),
        ({"policy_kwargs": {"schedule": [{"timezone": "Mars/Olympus"}]}}, "schedule.0.timezone: "),
        ({"policy_kwargs": {"schedule": [{"min_replicas": 3, "max_replicas": 2}]}}, "schedule.0: "),
    ],
)
def test_settings_of_the_scaling_policy_are_checked(changes: dict[str, Any], problem: str) -> None:
    policy = {"policy_function": strict_config.POLICY} | changes
    problems = strict_config.find_problems(changed(AUTOSCALING, OURS | {"policy": policy}))
    assert [one for one in problems if problem in one], problems


def test_serves_own_delays_beside_the_scaling_policy_are_a_problem() -> None:
    config = changed(AUTOSCALING, {"max_replicas": 2, "policy": {"policy_function": strict_config.POLICY}})
    problems = strict_config.find_problems(config)
    assert len(problems) == 2
    assert all("must be 0 with this policy" in problem for problem in problems)
    assert not strict_config.find_problems(
        changed(AUTOSCALING, OURS | {"policy": {"policy_function": strict_config.POLICY}})
    )


GATEWAYS = "applications.0.deployments.0"
SCALED = {"min_replicas": 2, "max_replicas": 6, "target_ongoing_requests": 200}


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (
            f"{GATEWAYS}.autoscaling_config",
            SCALED | {"min_replicas": 0},
            f"{GATEWAYS}.autoscaling_config.min_replicas: must be at least 1",
        ),
        ("applications.0.deployments.1.num_replicas", 2, "applications.0.deployments.1: a shard is one process"),
        ("applications.0.deployments.2.autoscaling_config", SCALED, "applications.0.deployments.2: a shard is one"),
    ],
)
def test_gateways_are_one_or_more_and_each_shard_is_one(path: str, value: Any, problem: str) -> None:
    config = changed(path, value)
    if "autoscaling_config" in path:
        config["applications"][0]["deployments"][0].pop("num_replicas")
    [found] = strict_config.find_problems(config)
    assert found.startswith(problem)


@pytest.mark.parametrize("options", [{"num_replicas": 3}, {"autoscaling_config": SCALED}])
def test_any_number_of_gateways_may_run(options: dict[str, Any]) -> None:
    config = changed("applications.0.args", {})
    gateway = config["applications"][0]["deployments"][0]
    del gateway["num_replicas"]
    gateway |= options
    assert strict_config.find_problems(config) == []
