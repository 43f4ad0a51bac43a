"""Describes the card, its driver and libraries, and measures three speeds that explain the other figures."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bench.gpu_check.part import Options, Report
from bench.gpu_check.parts import vllm_python

LIBRARIES = ("transformers", "tokenizers", "numpy", "pydantic", "llguidance", "triton", "pytest", "ray", "vllm")


def run(options: Options, report: Report) -> None:
    """Reports the machine. The figure `cuda` is the reason why there is no CUDA device, or None."""
    report.doing("loading torch")
    try:
        import torch
    except ImportError as error:
        report.add(cuda=f"torch cannot be imported: {error}")
        return
    report.add(python=platform.python_version(), torch=torch.__version__, cores=len(os.sched_getaffinity(0)))
    report.add(libraries={name: known for name in LIBRARIES if (known := _version(name))}, vllm_python=vllm_python())
    report.add(nvcc=shutil.which("nvcc"), cuda_home=os.environ.get("CUDA_HOME"), driver=nvidia_smi("driver_version"))
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        report.add(cuda=f"torch {torch.__version__} ({built}) finds no CUDA device")
        if options.on_gpu:
            return
    else:
        found = torch.cuda.get_device_properties(0)
        report.add(cuda=None, card=found.name, cards=torch.cuda.device_count(), cuda_version=torch.version.cuda)
        report.add(capability=f"{found.major}.{found.minor}", memory_gib=round(found.total_memory / 2**30, 1))
        report.add(multiprocessors=found.multi_processor_count)
    device = torch.device(options.device)
    report.doing("measuring the device")
    report.add(copy_gb_s=round(bandwidth(device) / 1e9, 1), matmul_tflop_s=round(matmul(device) / 1e12, 2))
    report.add(launch_us=round(launch(device) * 1e6, 2))


def synchronize(device: Any) -> None:
    """Waits for all work on a CUDA device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: Any) -> float:
    """Bytes per second that a large copy reads and writes."""
    import torch

    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(device, lambda: target.copy_(source))


def matmul(device: Any) -> float:
    """Floating-point operations per second in a product of square matrices, in bfloat16 on GPUs."""
    import torch

    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _fastest(device, lambda: left @ left)


def launch(device: Any, count: int = 2000) -> float:
    """Seconds that the host needs to start one small operation from Python."""
    import torch

    value = torch.zeros(8, device=device)
    fastest = float("inf")
    for _ in range(4):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            value.add_(1.0)
        fastest = min(fastest, time.perf_counter() - began)
        synchronize(device)
    return fastest / count


def _fastest(device: Any, work: Any) -> float:
    fastest = float("inf")
    for _ in range(8):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def nvidia_smi(field: str) -> str | None:
    """A field of the first card from nvidia-smi; None without nvidia-smi."""
    try:
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
