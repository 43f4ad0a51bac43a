"""Checks the devices in the settings, measures their free memory, and finds the input device of a placed model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from serve_app.contracts.units import GIB
from serve_app.engine.config import INT8_REMEDY, EngineSettings
from serve_app.engine.errors import ModelError

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of one value
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


def check_devices(settings: EngineSettings) -> None:
    """Check that every device in the settings exists.

    Raises:
        ModelError: an unknown name, or a device that this machine lacks.
    """
    wanted = settings.device_map
    if isinstance(wanted, str):
        if wanted not in _SPREAD:
            _check_device(wanted)
    else:
        if "" in wanted and len(wanted) > 1:  # accelerate would put everything there, even the named parts
            raise ModelError(
                "device_map contains '' (the whole model) and parts of it: name every part instead, "
                "such as model.embed_tokens, model.layers.0, model.norm, lm_head."
            )
        for device in wanted.values():
            if device != "disk":
                _check_device(device)
    for key in settings.max_memory or ():
        if key != "disk":
            _check_device(int(key) if str(key).isdigit() else key)


def check_gpus(settings: EngineSettings, asked: float) -> None:
    """Check that a process with `asked` GPUs (`num_gpus`) can use them and does not compute on the CPU instead.

    Raises:
        ModelError: the settings name no GPU, or torch finds none.
    """
    wanted = settings.device_map
    devices = [wanted] if isinstance(wanted, str) else wanted.values()
    if asked > 0 and all(device in ("cpu", "disk") for device in devices):
        raise ModelError(
            f"The replica has {asked:g} GPU (num_gpus), but device_map {wanted!r} computes on the CPU: set device_map "
            "to auto or cuda:0 and dtype to bfloat16, or set num_gpus to 0."
        )
    if asked > 0 and wanted in _SPREAD and not torch.cuda.is_available():
        raise ModelError(
            f"The replica has {asked:g} GPU (num_gpus), but torch finds no CUDA device: check the driver and "
            "CUDA_VISIBLE_DEVICES, or set device_map to cpu and num_gpus to 0 to compute on the CPU."
        )


def single_device(settings: EngineSettings) -> torch.device:
    """The device for int8 weights, which must be the CPU. Without CUDA devices, `auto` and similar mean the CPU.

    Raises:
        ModelError: the settings name several devices, or a GPU.
    """
    wanted = settings.device_map
    device = None
    if isinstance(wanted, str) and wanted not in _SPREAD:
        device = torch.device(wanted)
    elif isinstance(wanted, str) and not torch.cuda.is_available():
        device = torch.device("cpu")
    elif isinstance(wanted, dict) and list(wanted) == [""] and wanted[""] != "disk":
        device = torch.device(wanted[""])
    if device is None or device.type != "cpu":
        raise ModelError(f"dtype int8 places the whole model on the CPU, but device_map is {wanted!r}: {INT8_REMEDY}.")
    return device


def may_use_disk(settings: EngineSettings) -> bool:
    """Whether weights may stay on disk and be read each time their layer runs."""
    if isinstance(settings.device_map, str):
        return settings.device_map in _SPREAD
    return "disk" in settings.device_map.values()


def arguments(settings: EngineSettings) -> dict[str, Any]:
    """The settings as arguments of `from_pretrained`."""
    limits = settings.max_memory
    return {
        "device_map": settings.device_map,
        # accelerate identifies GPUs by number; YAML and JSON may have converted the numbers to text.
        "max_memory": limits and {int(k) if str(k).isdigit() else k: v for k, v in limits.items()},
    }


def offloaded_bytes(model: Any, settings: EngineSettings) -> int:
    """Size of a placed model's weights that are copied to their device in each step, in bytes.

    Raises:
        ModelError: some weights are neither on a device nor offloaded.
    """
    total = 0
    for name, module in model.named_modules():
        offloaded = [parameter for parameter in module.parameters(recurse=False) if parameter.is_meta]
        total += sum(parameter.nbytes for parameter in offloaded)
        if offloaded and not any(getattr(hook, "offload", False) for hook in _hooks(module)):
            raise ModelError(
                f"The weights of {name or 'the model'} do not fit on the devices of {settings.device_map!r}: "
                "use more or larger devices."
            )
    return total


def execution_device(model: Any) -> torch.device:
    """The input device of a placed model: the embedding's device, or its execution device if it is offloaded."""
    embedding = model.get_input_embeddings()
    if not embedding.weight.is_meta:
        return torch.device(embedding.weight.device)
    devices = [getattr(hook, "execution_device", None) for hook in _hooks(embedding)]
    return torch.device(next((device for device in devices if device is not None), "cpu"))


def _hooks(module: Any) -> list[Any]:
    """Accelerate's hooks on a module: none, one, or a chain."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _check_device(wanted: int | str) -> None:
    try:
        device = torch.device(wanted if isinstance(wanted, str) else f"cuda:{wanted}")
    except RuntimeError as error:
        raise ModelError(
            f"device_map or max_memory contains {wanted!r}, which is not a device: "
            f"use cpu, cuda:0 or disk; or, for the whole model, {', '.join(_SPREAD)}."
        ) from error
    if device.type == "cpu":
        return
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) < there:
            return
        found = f"cuda:0 to cuda:{there - 1}" if there else "no CUDA device"
        raise ModelError(f"There is no device {device}: torch finds {found} here; change device_map.")
    raise ModelError(f"Devices of type {device.type} are not supported: set device_map to cpu or cuda:0.")


def weight_bytes(sizes: Mapping[str, int], dtype: str) -> int:
    """Bytes of a model's weights when loaded as `dtype`. `sizes` has the number of elements of each tensor by name.

    With `int8`, matrices have a byte per weight. The embedding is float32; if it is also the output matrix, there is an
    additional int8 copy.
    """
    if dtype != "int8":
        return sum(sizes.values()) * _ITEM[dtype]
    tied = not any(name.endswith("lm_head.weight") for name in sizes)
    of_embedding = _ITEM["float32"] + tied
    return sum(size * (of_embedding if "embed_tokens" in name else 1) for name, size in sizes.items())


def devices_of(settings: EngineSettings) -> list[tuple[str, int]] | None:
    """Names and free bytes of the chosen devices; None if the settings assign memory or layers to devices."""
    wanted = settings.device_map
    if not isinstance(wanted, str) or settings.max_memory is not None:
        return None
    if wanted in _SPREAD and torch.cuda.is_available():
        return [(f"cuda:{index}", cuda_memory(f"cuda:{index}")) for index in range(torch.cuda.device_count())]
    if wanted.startswith("cuda"):
        return [(wanted, cuda_memory(wanted))]
    return [("cpu", available_memory())]


def require_memory(needed: int, task: str, remedy: str, available: int | None = None) -> None:
    """Check that a task's memory, in bytes, is available.

    Raises:
        ModelError: too little is available; the message names both amounts and the remedy.
    """
    there = available_memory() if available is None else available
    if needed > there:
        raise ModelError(
            f"Too little memory: {there / GIB:.1f} GiB are available, {task} needs {needed / GIB:.1f} GiB: {remedy}."
        )


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still allocate: on the machine, or within its container's limit if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Cached files count as used but can be dropped; Kubernetes computes a working set in the same way.
        return min(free, max(0, limit - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):  # no cgroup v2, or no limit
        return free


def cuda_memory(device: str) -> int:
    """Free bytes of a CUDA device, `cuda` or `cuda:N`, which must exist."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0])
