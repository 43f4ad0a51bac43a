"""Finds the GPUs of this machine with nvidia-smi, so that the launcher does not need CUDA."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serve_app.launch.preflight import LaunchError

_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap", "driver_version", "mig.mode.current")
_WSL = "/usr/lib/wsl/lib/nvidia-smi"
_ANSWER_S = 60.0  # timeout of nvidia-smi; without persistence mode, it starts the driver of each card first
CPU_INSTEAD = "or set GPUS=0 to compute on the CPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory: int  # bytes
    free: int  # bytes
    capability: tuple[int, int]  # compute capability
    driver: int  # major version

    @property
    def is_shared(self) -> bool:
        """Whether other programs use more than 5% of the GPU's memory."""
        return self.free < 0.95 * self.memory


@dataclass(frozen=True, slots=True)
class Found:
    """The GPUs that the service may use. If there are none, `remark` tells the operator why, if the reason is known."""

    gpus: tuple[Gpu, ...]
    remark: str = ""


def find_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> Found:
    """Returns the NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES allows.

    Raises LaunchError if the driver does not work, or a card can't be used.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH")) or (_WSL if Path(_WSL).is_file() else None)
    if program is None:
        return Found((), _why_none(devices))
    try:
        asked = subprocess.run(
            [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"nvidia-smi has not answered for {_ANSWER_S:.0f} s: restart the machine, {CPU_INSTEAD}"
        ) from None
    except OSError as error:
        raise LaunchError(f"{program} can't be run ({error.strerror}): repair the driver, {CPU_INSTEAD}") from None
    lines = (asked.stdout.strip() or asked.stderr.strip()).splitlines()
    if any(line.startswith("No devices were found") for line in lines):
        return Found((), "The NVIDIA driver finds no GPU.")
    if asked.returncode != 0 or not lines:
        raise LaunchError(
            f"nvidia-smi fails ({lines[0].strip() if lines else f'exit status {asked.returncode}'}): repair the "
            f"driver, so that `nvidia-smi` lists the GPUs, {CPU_INSTEAD}"
        )
    return Found(tuple(_visible([_gpu(line) for line in lines], environment.get("CUDA_VISIBLE_DEVICES"))))


def _gpu(line: str) -> Gpu:
    parts = [part.strip() for part in line.split(",")]
    try:
        index, uuid, name, total, free, capability, driver, mig = parts
        major, _, minor = capability.partition(".")
        gpu = Gpu(
            int(index),
            uuid,
            name,
            int(total) * 2**20,
            int(free) * 2**20,
            (int(major), int(minor)),
            int(driver.split(".")[0]),
        )
    except ValueError:
        raise LaunchError(
            f"nvidia-smi describes a GPU in an unknown form ({line.strip()}): write a configuration for it by hand "
            f"(docs/guides/vllm.md), {CPU_INSTEAD}"
        ) from None
    if mig == "Enabled":
        raise LaunchError(
            f"GPU {gpu.index} is divided (MIG): switch MIG off, hide it with CUDA_VISIBLE_DEVICES, {CPU_INSTEAD}"
        )
    return gpu


def _visible(gpus: list[Gpu], chosen: str | None) -> list[Gpu]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names by index or by the beginning of the UUID, in its order."""
    if chosen is None:
        return gpus
    found: list[Gpu] = []
    for name in filter(None, (part.strip() for part in chosen.split(","))):
        match = [
            gpu for gpu in gpus if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if not match:  # CUDA ignores this name and all after it
            break
        found += match
    return found


def _why_none(devices: Path) -> str:
    if sys.platform == "darwin":
        return "Apple GPUs are not supported."
    if (devices / "nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists():
        raise LaunchError(
            "there is an NVIDIA driver without nvidia-smi: install the package nvidia-utils of the driver's version, "
            + CPU_INSTEAD
        )
    if (devices / "kfd").exists():
        return "AMD GPUs are not supported: the service installs vLLM for NVIDIA GPUs only."
    return ""
