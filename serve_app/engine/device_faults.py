"""What an exception of a step says about the device: out of memory, lost for this process, or neither."""

from __future__ import annotations

import torch

_NO_MEMORY = ("out of memory", "can't allocate memory")
_LOST = ("CUDA error", "device-side assert", "HIP error")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller step may succeed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def is_device_lost(error: BaseException) -> bool:
    """Whether the process can't use its device any more: after such an error every later call on it fails too."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)
    )


def free_cached_memory() -> None:
    """Returns what torch keeps for later use, so that pieces of it can be joined."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
