"""Where a model's layers go: what `device_map` may say here, what goes to disk, and where a placed model computes."""

from __future__ import annotations

from typing import Any

import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError

_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


def check(settings: EngineSettings) -> None:
    """Find out whether every device that the settings name exists.

    Raises:
        ModelError: a name that means nothing, or a device that this machine lacks.
    """
    wanted = settings.device_map
    if isinstance(wanted, str):
        if wanted not in _SPREAD:
            _check_device(wanted)
    else:
        if "" in wanted and len(wanted) > 1:  # accelerate would put everything there, what is elsewhere included
            raise ModelError(
                "device_map names '' (the whole model) beside parts of it: name every part, "
                "as model.embed_tokens, model.layers.0, model.norm, lm_head."
            )
        for device in wanted.values():
            if device != "disk":
                _check_device(device)
    for key in settings.max_memory or ():
        if key != "disk":
            _check_device(int(key) if str(key).isdigit() else key)


def single_device(settings: EngineSettings) -> torch.device:
    """The one device that int8 weights go to; a spread over a machine without CUDA devices is its CPU.

    Raises:
        ModelError: the settings ask for several.
    """
    wanted = settings.device_map
    if isinstance(wanted, str) and wanted not in _SPREAD:
        return torch.device(wanted)
    if isinstance(wanted, str) and not torch.cuda.is_available():
        return torch.device("cpu")
    if isinstance(wanted, dict) and list(wanted) == [""] and wanted[""] != "disk":
        return torch.device(wanted[""])
    raise ModelError(
        f"dtype int8 places a model on one device, and device_map is {wanted!r}: "
        "set device_map to cpu or cuda:0, or dtype to bfloat16."
    )


def may_use_disk(settings: EngineSettings) -> bool:
    """Whether weights may stay on disk, to be read whenever their layer runs."""
    if isinstance(settings.device_map, str):
        return settings.device_map in _SPREAD
    return "disk" in settings.device_map.values()


def arguments(settings: EngineSettings) -> dict[str, Any]:
    """The settings as `from_pretrained` takes them."""
    limits = settings.max_memory
    return {
        "device_map": settings.device_map,
        # accelerate knows GPUs by number; YAML and JSON may have made text of them.
        "max_memory": limits and {int(k) if str(k).isdigit() else k: v for k, v in limits.items()},
    }


def offloaded_bytes(model: Any, settings: EngineSettings) -> int:
    """Bytes of a placed model's weights that lie elsewhere than where they are used, brought there for each step.

    Raises:
        ModelError: some weights have no place at all.
    """
    total = 0
    for name, module in model.named_modules():
        away = [parameter for parameter in module.parameters(recurse=False) if parameter.is_meta]
        total += sum(parameter.nbytes for parameter in away)
        if away and not any(getattr(hook, "offload", False) for hook in _hooks(module)):
            raise ModelError(
                f"The weights of {name or 'the model'} have no place on the devices of {settings.device_map!r}: "
                "use more or larger ones."
            )
    return total


def execution_device(model: Any) -> torch.device:
    """Where a placed model takes its input: its embedding's device, or the one that an offloaded one is brought to."""
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
            f"device_map or max_memory names {wanted!r}, which is no device: "
            f"choose cpu, cuda:0 or disk, or for all layers {', '.join(_SPREAD)}."
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
