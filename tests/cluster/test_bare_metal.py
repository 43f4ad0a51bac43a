"""The units for machines with systemd: systemd accepts them, each role gets its own secrets, nothing is cut."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from .checks import CLUSTER, DRAIN, FLAGS, SECRETS, deployments, flags, read

UNITS = CLUSTER / "bare-metal"
ROLES = {
    "head": set(),
    "gateway": {"SERVE_APP_OPERATOR_KEY", "SERVE_APP_KEY_SECRET"},
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
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=30)
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


@pytest.mark.parametrize("role", ROLES)
def test_ray_starts_in_the_foreground_with_the_flags_and_what_the_role_offers(role: str, tmp_path: Path) -> None:
    for folder in ("venv/bin", "cluster/bare-metal"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(CLUSTER / "flags.env", tmp_path / "cluster")
    shutil.copy(UNITS / "start-ray", tmp_path / "cluster" / "bare-metal")
    ray = tmp_path / "venv" / "bin" / "ray"
    ray.write_text(f'#!/bin/bash\nenv > {tmp_path}/env\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    ray.chmod(0o755)
    command = service(role)["ExecStart"].replace("/opt/serve-app", str(tmp_path)).replace("${RAY_HEAD}", "head:6379")
    subprocess.run(shlex.split(command), check=True, timeout=60)
    environment = (tmp_path / "env").read_text()
    assert [name for name in FLAGS if f"\n{name}=" not in f"\n{environment}"] == []
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:2] == ["start", "--block"]
    assert ("--head" in arguments) == (role == "head")
    assert ("--num-cpus=0" in arguments) == (role == "head")
    assert ("--num-gpus=0" in arguments) == (role != "model")
    offered = [one for one in arguments if one.startswith("--resources=")]
    assert offered == ([f'--resources={{"{role}": 1}}'] if role in ("gateway", "accounting") else [])


def test_every_deployment_finds_a_machine() -> None:
    for deployment in deployments(read("serve-gpu.yaml")):
        options = deployment["ray_actor_options"]
        assert options.get("num_gpus") or options["resources"].keys() <= ROLES.keys()
