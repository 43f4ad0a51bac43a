"""The files for Ray's cluster launcher: Ray's own schema takes them, and every node starts with flags and secrets."""

import copy

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from .checks import FLAGS, Document, flags, launcher_problems, read, serve_problems
from .mutate import REMOVED, broken, renamed

CLOUDS = ["aws.yaml", "gcp.yaml"]


@pytest.fixture(params=CLOUDS)
def launcher(request: pytest.FixtureRequest) -> Document:
    return read(request.param)


def test_it_is_sound(launcher: Document) -> None:
    assert launcher_problems(launcher, flags()) == []


def test_rays_own_check_takes_it(launcher: Document) -> None:
    validate_config(prepare_config(copy.deepcopy(launcher)))


def test_its_nodes_have_room_for_what_is_served(launcher: Document) -> None:
    types = launcher["available_node_types"]
    serve = read("serve-gpu.yaml")
    assert serve_problems(serve) == []
    gateway, model = serve["applications"][0]["deployments"][0], serve["applications"][1]["deployments"][0]
    assert types["gateway"]["min_workers"] >= gateway["num_replicas"]
    assert types["gateway"]["resources"]["gateway"] >= 1
    assert types["gpu"]["max_workers"] >= model["autoscaling_config"]["max_replicas"]
    assert types["gpu"]["resources"]["GPU"] >= model["ray_actor_options"]["num_gpus"]
    assert types["gpu"]["resources"]["CPU"] >= model["ray_actor_options"]["num_cpus"]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_missing_flag_is_found(launcher: Document, flag: str) -> None:
    assert launcher_problems(launcher, {name: value for name, value in flags().items() if name != flag}) != []


def test_a_flag_that_is_off_is_found(launcher: Document) -> None:
    assert launcher_problems(launcher, flags() | {"RAY_SERVE_ENABLE_HA_PROXY": "0"}) != []


@pytest.mark.parametrize("part", ["head_start_ray_commands", "worker_start_ray_commands"])
@pytest.mark.parametrize("needed", ["flags.env", "secrets.env", "set -a", "ray start"])
def test_ray_that_starts_without_its_environment_is_found(launcher: Document, part: str, needed: str) -> None:
    command = launcher[part][1]
    assert needed in command
    assert launcher_problems(broken(launcher, f"{part}/1", command.replace(needed, "true")), flags()) != []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("cluster_name", "name"),
        ("setup_commands", "setup_command"),
        ("auth/ssh_user", "user"),
        ("available_node_types/gpu/min_workers", "min_worker"),
        ("available_node_types/gpu/node_config", "config"),
    ],
)
def test_a_misspelt_key_is_found(launcher: Document, path: str, name: str) -> None:
    assert launcher_problems(renamed(launcher, path, name), flags()) != []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("provider/type", REMOVED),
        ("max_workers", "many"),
        ("max_workers", 2),
        ("head_node_type", "haed"),
        ("setup_commands", "pip install"),
        ("setup_commands", []),
        ("available_node_types/gpu/resources/GPU", "one"),
        ("available_node_types/gpu/resources/GPU", REMOVED),
        ("available_node_types/gpu/min_workers", 9),
        ("available_node_types/head/resources/CPU", 4),
    ],
)
def test_a_wrong_value_is_found(launcher: Document, path: str, value: object) -> None:
    assert launcher_problems(broken(launcher, path, value), flags()) != []
