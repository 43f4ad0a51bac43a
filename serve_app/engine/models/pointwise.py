"""The small operations between a decoder's matrices: plain, or compiled into one GPU kernel each.

A decode step at batch 1 does hardly any arithmetic; what it costs beyond reading the weights is the number of
kernels. Compiled, the rotation is one instead of four and the gate one instead of two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention

logger = logging.getLogger(__name__)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Turn (T, heads, size) by its position: bit for bit `x * cos + rotate_half(x) * sin`, in fewer operations.

    `cos` and `signed_sin` are (T, 1, size); the latter is the sine, negative in the first half.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half times the second: (T, 2 n) to (T, n)."""
    first, second = gate_up.chunk(2, dim=-1)
    return F.silu(first) * second


@dataclass(frozen=True, slots=True)
class Pointwise:
    """One choice of each operation."""

    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = rotate
    gate: Callable[[torch.Tensor], torch.Tensor] = gate


PLAIN = Pointwise()


def compiled(device: torch.device, dtype: torch.dtype, **options: Any) -> Pointwise:
    """The operations as torch compiles them for a device, or plain ones and a line that says so if it can't.

    Tried once on a few sizes, so that what goes wrong does so here. `options` are `torch.compile`'s.
    """
    try:
        choice = Pointwise(*(torch.compile(f, dynamic=True, **options) for f in (rotate, gate)))
        with torch.inference_mode():
            for rows in (1, 2, 5):
                joined = torch.zeros(rows, 6, 16, dtype=dtype, device=device)
                factors = torch.zeros(rows, 1, 16, dtype=dtype, device=device)
                choice.rotate(joined[:, :4], factors, factors)
                choice.gate(joined.flatten(1))
    except Exception as error:
        reason = " ".join(str(error).splitlines()[:2])  # the second line has the backend's own words
        logger.warning("Small operations stay uncompiled, which costs a little speed: %s", reason)
        return PLAIN
    return choice
