"""The GPUs of a machine, from an nvidia-smi that this test puts on PATH."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.launch import gpus
from serve_app.launch.gpus import find_gpus
from serve_app.launch.preflight import LaunchError

H100 = "0, GPU-1d4a, NVIDIA H100 80GB HBM3, 81559, 81004, 9.0, 580.95.05, Disabled"
L4 = "1, GPU-77b0, NVIDIA L4, 23034, 22565, 8.9, 580.95.05, [N/A]"
Install = Callable[..., dict[str, str]]


@pytest.fixture
def smi(tmp_path: Path) -> Install:
    """Makes an nvidia-smi that prints lines. Returns an environment in which it is found."""

    def install(*lines: str, code: int = 0, error: str = "") -> dict[str, str]:
        program = tmp_path / "nvidia-smi"
        printed = "".join(f"echo {shlex.quote(line)}\n" for line in lines)
        program.write_text(f"#!/bin/sh\n{printed}{f'echo {shlex.quote(error)} >&2' if error else ''}\nexit {code}\n")
        program.chmod(0o755)
        return {"PATH": str(tmp_path)}

    return install


def test_memory_capability_and_driver_are_read(smi: Install) -> None:
    first, second = find_gpus(smi(H100, L4)).gpus
    assert (first.name, first.memory, first.free) == ("NVIDIA H100 80GB HBM3", 81559 * 2**20, 81004 * 2**20)
    assert (first.capability, second.capability, first.driver) == ((9, 0), (8, 9), 580)
    assert not first.is_shared


@pytest.mark.parametrize(
    ("visible", "found"),
    [("0,1", [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("GPU-77", [1]), ("", []), ("-1", []), ("0,9,1", [0])],
)
def test_only_gpus_that_cuda_may_use_count(smi: Install, visible: str, found: list[int]) -> None:
    environment = smi(H100, L4) | {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.index for gpu in find_gpus(environment).gpus] == found


def test_a_broken_driver_is_reported_with_what_to_do(smi: Install) -> None:
    broken = smi(code=9, error="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    with pytest.raises(LaunchError, match=r"couldn't communicate .*repair the driver.*GPUS=0"):
        find_gpus(broken)
    with pytest.raises(LaunchError, match="exit status 127"):
        find_gpus(smi(code=127))


def test_a_driver_that_hangs_is_reported(smi: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*arguments: object, **options: object) -> None:
        raise gpus.subprocess.TimeoutExpired("nvidia-smi", 60)

    environment = smi(H100)
    monkeypatch.setattr(gpus.subprocess, "run", hangs)
    with pytest.raises(LaunchError, match="has not answered for 60 s"):
        find_gpus(environment)


def test_a_card_that_cannot_be_planned_is_refused(smi: Install) -> None:
    with pytest.raises(LaunchError, match=r"unknown form \(0, GPU-1, NVIDIA GB10, \[N/A\]"):
        find_gpus(smi("0, GPU-1, NVIDIA GB10, [N/A], [N/A], 12.1, 580.95.05, [N/A]"))
    with pytest.raises(LaunchError, match=r"GPU 0 is divided \(MIG\)"):
        find_gpus(smi(H100.replace("Disabled", "Enabled")))


def test_without_a_gpu_the_reason_is_told(tmp_path: Path, smi: Install) -> None:
    nothing = {"PATH": str(tmp_path / "empty")}
    assert find_gpus(nothing, tmp_path) == gpus.Found((), "")
    (tmp_path / "kfd").touch()
    assert "AMD GPUs are not supported" in find_gpus(nothing, tmp_path).remark
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(LaunchError, match="an NVIDIA driver without nvidia-smi"):
        find_gpus(nothing, tmp_path)
    assert find_gpus(smi("No devices were found", code=6)).remark == "The NVIDIA driver finds no GPU."
