"""The units for machines with systemd: systemd accepts them, each role gets its own secrets, nothing is cut."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from .checks import (
    CLUSTER,
    DRAIN,
    FLAGS,
    REPOSITORY,
    SECRETS,
    asked_of,
    deployments,
    flags,
    places,
    private_tmp_problems,
    read,
)

UNITS = CLUSTER / "bare-metal"
ROLES = {
    "head": set(),
    "gateway": {"SERVE_APP_OPERATOR_KEY", "SERVE_APP_SECRET_KEY"},
    "accounting": {"SERVE_APP_DATABASE_URL"},
    "model": set(),
}


def service(role: str) -> dict[str, str]:
    parser = RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / f"serve-app-{role}.service")
    return dict(parser["Service"])


def variables(role: str) -> dict[str, str]:
    lines = (UNITS / f"{role}.env.template").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units() -> None:
    units = [str(path) for path in sorted(UNITS.glob("*.service"))]
    assert len(units) == len(ROLES)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_is_stopped_later_than_its_node_is_drained(role: str) -> None:
    unit = service(role)
    assert int(unit["TimeoutStopSec"]) > int(flags()[DRAIN])
    assert unit["KillMode"] == "mixed"  # SIGTERM for Ray's main process alone, which drains
    assert unit["User"] == "serve-app"
    assert unit["EnvironmentFile"] == f"/etc/serve-app/{role}.env"


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_the_secrets_that_it_needs_and_no_other(role: str) -> None:
    given = variables(role)
    assert given.keys() & set(SECRETS) == ROLES[role]
    assert given["RAY_AUTH_MODE"] == "token"
    assert set(given.values()) == {"token", "REPLACE_ME"}
    assert ("RAY_HEAD" in given) == (role != "head")


def started(role: str, folder: Path, tls: Path) -> tuple[dict[str, str], list[str]]:
    """The environment and the arguments that Ray gets; `tls` is in the place of the machine's own file."""
    for part in ("venv/bin", "cluster/bare-metal"):
        (folder / part).mkdir(parents=True)
    for file in ("flags.env", "private-tmp.sh"):
        shutil.copy(CLUSTER / file, folder / "cluster")
    shutil.copy(UNITS / "start-ray", folder / "cluster" / "bare-metal")
    ray = folder / "venv" / "bin" / "ray"
    ray.write_text(
        f'#!/bin/bash\nenv -0 > {folder}/env\nprintf "%s\\n" "$@" > {folder}/arguments\numask > {folder}/umask\n'
    )
    ray.chmod(0o755)
    command = service(role)["ExecStart"].replace("/opt/serve-app", str(folder)).replace("${RAY_HEAD}", "head:6379")
    environment = {**os.environ, "SERVE_APP_RAY_TLS": str(tls), "SERVE_APP_HOME": str(folder / "state")}
    subprocess.run(shlex.split(command), check=True, timeout=300, env=environment)
    found = dict(one.split("=", 1) for one in (folder / "env").read_text().split("\0") if one)
    return found, (folder / "arguments").read_text().splitlines()


def test_a_machine_with_certificates_starts_ray_with_tls(tmp_path: Path) -> None:
    tls = tmp_path / "ray-tls.env"
    environment, _ = started("head", tmp_path / "without", tls)
    assert "RAY_USE_TLS" not in environment
    tls.write_text("RAY_USE_TLS=1\nRAY_TLS_CA_CERT='/etc/a folder/ca.pem'\n")
    environment, _ = started("model", tmp_path / "with", tls)
    assert (environment["RAY_USE_TLS"], environment["RAY_TLS_CA_CERT"]) == ("1", "/etc/a folder/ca.pem")


@pytest.mark.parametrize("role", ROLES)
def test_ray_starts_in_the_foreground_with_the_flags_and_what_the_role_offers(role: str, tmp_path: Path) -> None:
    environment, arguments = started(role, tmp_path, tmp_path / "none")
    assert [name for name in FLAGS if name not in environment] == []
    assert arguments[:2] == ["start", "--block"]
    assert ("--head" in arguments) == (role == "head")
    assert ("--num-cpus=0" in arguments) == (role == "head")
    assert ("--num-gpus=0" in arguments) == (role != "model")
    offered = [one for one in arguments if one.startswith("--resources=")]
    assert offered == ([f'--resources={{"{role}": 1}}'] if role in ("gateway", "accounting") else [])


@pytest.mark.parametrize("role", ROLES)
def test_only_the_services_user_reaches_rays_sockets_and_haproxys(role: str, tmp_path: Path) -> None:
    old = tmp_path / "state" / "tmp" / "ray" / "session_old"
    old.mkdir(parents=True)
    (tmp_path / "state" / "tmp").chmod(0o777)
    environment, arguments = started(role, tmp_path, tmp_path / "none")
    assert [*private_tmp_problems(environment, tmp_path / "state" / "tmp", "/var/lib/serve-app/tmp")] == []
    assert not old.exists()
    assert not [one for one in arguments if one.startswith("--temp-dir")]  # it would take precedence
    assert (tmp_path / "umask").read_text().strip() == "0077"
    assert service(role)["Environment"].split()[0] == "SERVE_APP_HOME=/var/lib/serve-app"


def guide() -> str:
    return (REPOSITORY / "docs" / "deploy" / "bare-metal.md").read_text(encoding="utf-8")


def test_the_guide_installs_vllm_where_the_replicas_start_it() -> None:
    [command] = [line for line in guide().splitlines() if "vllm_environment" in line]
    folder = shlex.split(command)[shlex.split(command).index("--folder") + 1]
    models = [one for one in deployments(read("serve-gpu.yaml")) if one["name"] == "Model"]
    for options in (one["ray_actor_options"] for one in models):
        assert options["runtime_env"] == {"py_executable": f"{folder}/bin/python"}


def test_a_gateway_machine_of_the_guide_takes_three_gateways_and_the_console() -> None:
    served = {one["name"]: one for one in deployments(read("serve-gpu.yaml"))}
    [offered] = re.findall(r"--resources=(\{.*?\})", service("gateway")["ExecStart"])
    room = json.loads(offered) | {"CPU": 4}
    for promise in ("with four cores", "up to three gateways", "three times the number of gateway machines"):
        assert promise in guide()
    assert places(served["Gateway"], room) == 3
    for name in room:
        together = 3 * asked_of(served["Gateway"])[name] + asked_of(served["Console"])[name]
        assert round(together, 4) <= room[name]
    assert served["Gateway"]["autoscaling_config"]["min_replicas"] > 3  # two machines


def test_every_deployment_finds_a_machine() -> None:
    for deployment in deployments(read("serve-gpu.yaml")):
        options = deployment["ray_actor_options"]
        assert options.get("num_gpus") or options["resources"].keys() <= ROLES.keys()
