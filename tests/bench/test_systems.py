"""The systems of the gateway benchmark, as far as they show without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gateway.speedups import With, Without
from bench.gateway.systems import FULL, Bare, Full, find_systems
from bench.harness.servers import Launched, deployment
from deployments import strict_config


def test_the_service_is_measured_over_the_stub_with_limits_that_the_load_does_not_reach(tmp_path: Path) -> None:
    config = Full(tmp_path).config()
    assert strict_config.find_problems(config) == []
    assert [one["name"] for one in config["applications"]] == ["gateway", "stub"]
    assert deployment(config, "Gateway")["user_config"]["models"]["svc-chat"]["backends"] == {"stub": 100}
    assert deployment(config, "Limiter")["user_config"]["contract"]["rpm"] == 10**7


def test_numbers_of_gateway_processes_are_compared_as_systems(tmp_path: Path) -> None:
    systems, missing = find_systems(tmp_path, (FULL,), None, (1, 2))
    assert ([system.name for system in systems], missing) == (["full", "full-2"], {})
    configs = [system.config() for system in systems if isinstance(system, Full)]
    assert [deployment(config, "Gateway")["num_replicas"] for config in configs] == [1, 2]
    assert not any(strict_config.find_problems(config) for config in configs)
    assert systems[0].home != systems[1].home  # type: ignore[attr-defined]


def test_the_bare_path_calls_the_same_stub(tmp_path: Path) -> None:
    full, bare = Full(tmp_path).config(), Bare(tmp_path).config()
    assert deployment(full, "Stub") == deployment(bare, "Stub")


@pytest.mark.parametrize("kind", [With, Without])
def test_a_pair_differs_only_by_its_environment(tmp_path: Path, kind: type[With | Without]) -> None:
    system = kind(tmp_path, "sockets")
    assert system.config() == Full(tmp_path).config()
    assert ("SERVE_APP_BENCH_WITHOUT" in system.environment()) == (kind is Without)


def test_each_turn_has_a_new_ledger(tmp_path: Path) -> None:
    system: Launched = With(tmp_path, "sockets")
    system.port = 1
    (system.home / "old").mkdir(parents=True)
    command = system.command()
    assert command[command.index("--home") + 1] == str(system.home)
    assert list(system.home.iterdir()) == []
