"""A service whose parts would cut longer replies does not start, and the error names the smallest change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import strict_config
from serve_app.settings import SettingsError
from serve_app.times import DRAIN, HARD_STOP, Part, chain_problems

from .test_strict_config import GOOD, ROOT, changed

MODEL = "applications.1.deployments.0.graceful_shutdown_timeout_s"
GATEWAY = "applications.0.deployments.0.graceful_shutdown_timeout_s"
REPLY = "the longest reply (529.6 s): raise it to 530 s or more"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (MODEL, 300, f"{MODEL} is 300 s, not longer than {REPLY}"),
        (MODEL, 660, f"applications.0.deployments.0.{strict_config.STOPS} is 660 s, not longer than {MODEL} (660 s)"),
        (GATEWAY, 600, f"{GATEWAY} is 600 s, not longer than {MODEL} (600 s): raise it to 601 s or more"),
        (
            "applications.0.deployments.0.user_config.queue_timeout_s",
            300,
            f"{MODEL} is 600 s, not longer than the longest reply (709.6 s): raise it to 710 s or more",
        ),
    ],
)
def test_a_part_that_is_too_short_is_named_with_both_numbers(
    tmp_path: Path, path: str, value: Any, problem: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(changed(path, value)))
    with pytest.raises(SettingsError) as error:
        strict_config.load_config(file)
    [line] = str(error.value).splitlines()
    assert problem in line


def test_our_own_times_fit() -> None:
    assert list(strict_config.time_problems(GOOD, {HARD_STOP: "900"})) == []
    cluster = yaml.safe_load((ROOT / "cluster/serve-gpu.yaml").read_text())
    assert list(strict_config.time_problems(cluster, {HARD_STOP: "720", DRAIN: "750"})) == []


def test_the_flags_of_this_machine_count_where_they_are_set() -> None:
    [first, second] = strict_config.time_problems(GOOD, {HARD_STOP: "660", DRAIN: "30"})
    assert first.startswith(f"{HARD_STOP} is 660 s, not longer than applications.0.")
    assert second == f"{DRAIN} is 30 s, not longer than {HARD_STOP} (660 s): raise it to 661 s or more"


def test_a_flag_that_is_no_number_is_named() -> None:
    problems = list(strict_config.time_problems(GOOD, {HARD_STOP: "12 minutes"}))
    assert problems == [f"{HARD_STOP} must be a number of seconds, not '12 minutes'"]


def test_a_part_is_compared_with_the_longest_one_before_it_and_unknown_parts_are_passed_over() -> None:
    chain = [[Part("a", 1), Part("b", 5)], [], [Part("c", 3)]]
    assert list(chain_problems(chain)) == ["c is 3 s, not longer than b (5 s): raise it to 6 s or more"]
