"""Classifies an exception of a step: out of memory, device lost for this process, or neither."""

from __future__ import annotations

import torch

_NO_MEMORY = ("out of memory", "can't allocate memory")
_LOST = ("CUDA error", "device-side assert", "HIP error")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. A smaller step may then succeed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def is_device_lost(error: BaseException) -> bool:
    """Whether the process can no longer use its device: every later call on the device would fail too."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
    )


def free_cached_memory() -> None:
    """Release the memory that torch has cached. The device can then merge free pieces into larger ones."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
