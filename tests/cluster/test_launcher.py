"""The files for Ray's cluster launcher: Ray's own schema accepts them, and every node starts with the flags,
and with the secrets where they are used."""

import copy
import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from .checks import (
    CLUSTER,
    FLAGS,
    READ,
    SECRETS,
    Document,
    asked_of,
    flags,
    launcher_problems,
    places,
    private_tmp_problems,
    read,
    serve_problems,
)
from .mutate import REMOVED, broken, renamed

CLOUDS = ["aws.yaml", "gcp.yaml"]


@pytest.fixture(params=CLOUDS)
def launcher(request: pytest.FixtureRequest) -> Document:
    return read(request.param)


def test_the_configuration_of_the_launcher_is_valid(launcher: Document) -> None:
    assert launcher_problems(launcher, flags()) == []


def test_rays_own_check_accepts_the_configuration(launcher: Document) -> None:
    validate_config(prepare_config(copy.deepcopy(launcher)))


def test_the_nodes_have_room_for_the_deployments(launcher: Document) -> None:
    types = launcher["available_node_types"]
    serve = read("serve-gpu.yaml")
    assert serve_problems(serve) == []
    deployments = {one["name"]: one["deployments"] for one in serve["applications"]}
    gateway, model = deployments["gateway"][0], deployments["qwen25-7b"][0]
    room, scaling = types["gateway"]["resources"], gateway["autoscaling_config"]
    assert types["gateway"]["min_workers"] == math.ceil(scaling["min_replicas"] / places(gateway, room)) > 1
    assert types["gateway"]["max_workers"] * places(gateway, room) == scaling["max_replicas"]
    # One machine may have three gateways, and all that runs beside them, but only one shard of accounting.
    beside = [*deployments["gateway"][1:-1], *deployments["console"]]
    together = [gateway] * places(gateway, room) + beside
    for name in room:
        assert round(sum(asked_of(one).get(name, 0) for one in together), 4) <= room[name]
    assert [one["name"] for one in deployments["gateway"][1:]] == ["Limiter", "Accounting", "Accounting-1"]
    assert places(deployments["gateway"][-1], room) == 1
    assert types["gpu"]["max_workers"] >= model["autoscaling_config"]["max_replicas"]
    assert types["gpu"]["resources"]["GPU"] >= model["ray_actor_options"]["num_gpus"]
    assert types["gpu"]["resources"]["CPU"] >= model["ray_actor_options"]["num_cpus"]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_missing_flag_is_found(launcher: Document, flag: str) -> None:
    assert launcher_problems(launcher, {name: value for name, value in flags().items() if name != flag}) != []


def test_a_flag_that_is_off_is_found(launcher: Document) -> None:
    assert launcher_problems(launcher, flags() | {"RAY_SERVE_ENABLE_HA_PROXY": "0"}) != []


def test_an_image_with_an_old_driver_is_found() -> None:
    gcp = read("gcp.yaml")
    path = "available_node_types/gpu/node_config/disks/0/initializeParams/sourceImage"
    for image in ("projects/x/global/images/family/common-cu128-ubuntu-2404-nvidia-570", "projects/x/family/ubuntu"):
        assert any("gpu: the machine image" in one for one in launcher_problems(broken(gcp, path, image), flags()))


@pytest.mark.parametrize("minimum", ["true", "570"])
def test_a_launcher_that_does_not_check_the_driver_is_found(launcher: Document, minimum: str) -> None:
    command = launcher["setup_commands"][0].replace("-ge 580", "true" if minimum == "true" else f"-ge {minimum}")
    found = launcher_problems(broken(launcher, "setup_commands/0", command), flags())
    assert found == ["gpu: no setup command checks that the driver is 580 or newer"]


@pytest.mark.parametrize(("driver", "passes"), [("570.172.08", False), ("580.95.05", True), ("595.91.07", True)])
def test_a_machine_with_an_old_driver_is_given_up(
    launcher: Document, tmp_path: Path, driver: str, passes: bool
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    command = launcher["setup_commands"][0].replace("/proc/driver/nvidia/version", str(tmp_path / "nvidia-smi"))
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", command], env=given, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == passes
    assert passes or "older than 580" in done.stderr


def test_a_machine_without_a_gpu_is_not_asked_for_its_driver(launcher: Document, tmp_path: Path) -> None:
    command = launcher["setup_commands"][0].replace("/proc/driver/nvidia/version", str(tmp_path / "none"))
    assert subprocess.run(["bash", "-c", command], timeout=300).returncode == 0


def vllm_command(launcher: Document) -> str:
    [command] = [one for one in launcher["setup_commands"] if "vllm_environment" in one]
    return command


def test_gpu_machines_install_vllm_where_the_replicas_start_it(launcher: Document, tmp_path: Path) -> None:
    [model] = [one for one in read("serve-gpu.yaml")["applications"] if one["args"].get("engine") == "vllm"]
    python = Path(model["deployments"][0]["ray_actor_options"]["runtime_env"]["py_executable"])
    for gpus, installs in ((0, False), (1, True)):
        home = tmp_path / str(gpus)
        (home / "venv" / "bin").mkdir(parents=True)
        (home / "sudo").write_text(f'#!/bin/sh\necho "$@" >> {home}/prepared\n')
        (home / "venv" / "bin" / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {home}/arguments\n')
        for file in (home / "sudo", home / "venv" / "bin" / "python"):
            file.chmod(0o755)
        driver = home / ("sudo" if gpus else "none")
        command = vllm_command(launcher).replace("/proc/driver/nvidia/version", str(driver))
        command = command.replace("/home/ubuntu", str(home))
        subprocess.run(["bash", "-c", command], env={"PATH": f"{home}:{os.environ['PATH']}"}, check=True, timeout=300)
        assert (home / "arguments").exists() == installs
    arguments = (home / "arguments").read_text().splitlines()
    assert arguments[:4] == ["-m", "serve_app.launch.vllm_environment", "--device", "cuda"]
    assert arguments[4:] == ["--folder", str(python.parents[1]), "--project", f"{home}/serve-app"]
    assert (home / "prepared").read_text() == f"install -d -o ubuntu {python.parents[1]}\n"


def test_machines_get_what_vllm_compiles_with_before_it_is_installed(launcher: Document) -> None:
    commands = launcher["setup_commands"]
    [packages] = [index for index, one in enumerate(commands) if "apt-get install" in one]
    assert {"g++", "python3-dev"} <= set(commands[packages].partition("apt-get install")[2].strip(")").split())
    assert packages < commands.index(vllm_command(launcher))


@pytest.mark.parametrize("part", ["head_start_ray_commands", "worker_start_ray_commands"])
@pytest.mark.parametrize("needed", [*READ, "set -a", "ray start"])
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


# While they are replaced.
PREVIOUS = "SERVE_APP_OPERATOR_KEY_PREVIOUS=the-key-before\nSERVE_APP_SECRET_KEY_PREVIOUS=the-secret-before\n"


def started_with(launcher: Document, part: str, resources: str, home: Path) -> dict[str, str]:
    """The environment that Ray starts with on a machine of these resources, and the secrets left in its file."""
    (home / "serve-app" / "cluster").mkdir(parents=True)
    (home / "venv" / "bin").mkdir(parents=True)
    for file in ("flags.env", "private-tmp.sh"):
        (home / "serve-app" / "cluster" / file).write_text((CLUSTER / file).read_text())
    (home / "secrets.env").write_text((CLUSTER / "secrets.env.template").read_text() + PREVIOUS)
    ray = home / "venv" / "bin" / "ray"
    ray.write_text(f"#!/bin/sh\nenv > {home}/environment\n")
    ray.chmod(0o755)
    (command,) = [command for command in launcher[part] if "ray start" in command]
    command = command.replace("/home/ubuntu", str(home)).replace("ulimit -n 65536", "true")
    given = {"PATH": os.environ["PATH"], "RAY_OVERRIDE_RESOURCES": resources, "RAY_HEAD_IP": "10.0.0.1"}
    subprocess.run(["bash", "-c", command], env=given, check=True, timeout=300)
    return dict(line.split("=", 1) for line in (home / "environment").read_text().splitlines() if "=" in line)


def test_only_gateway_machines_start_ray_with_the_secrets(launcher: Document, tmp_path: Path) -> None:
    types = launcher["available_node_types"]
    kinds = {
        "head": "head_start_ray_commands",
        "gateway": "worker_start_ray_commands",
        "gpu": "worker_start_ray_commands",
    }
    for kind, part in kinds.items():
        started = started_with(launcher, part, json.dumps(types[kind]["resources"]), tmp_path / kind)
        assert started["RAY_AUTH_MODE"] == "token"
        assert started["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert {name for name in SECRETS if name in started} == (set(SECRETS) if kind == "gateway" else set())
        folder = tmp_path / kind / "tmp"
        assert [*private_tmp_problems(started, folder, "/home/ubuntu/tmp")] == []
    left = (tmp_path / "gpu" / "secrets.env").read_text()
    assert [name for name in SECRETS if name in left] == []
