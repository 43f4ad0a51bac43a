"""Int8 weights and activations: one scale per row of a matrix, one scale per 64 activations of a token.

Both are symmetric in -127 .. 127, and a group's products are added exactly in 32 bits. So nothing saturates on any
processor, and a result does not depend on the rest of the batch. A single scale for all of a token's activations loses
three times as much quality, because a few large activations leave few levels for the rest (see docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention

LEVELS = 127
GROUP = 64  # number of activations that share a scale

_SLICE = 1024  # rows that are quantized together


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix (out, in) as `values * scales[:, None]`."""

    values: torch.Tensor  # int8 (out, in)
    scales: torch.Tensor  # float32 (out,)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def quantize_rows(matrix: torch.Tensor) -> Int8Weight:
    """Round each row to 255 levels, scaled by its largest magnitude; a row of zeros has the scale 0."""
    values = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(matrix.shape[0], device=matrix.device)
    # Works in slices, because an output matrix may have gigabytes, and each operation makes a float32 copy.
    for begin in range(0, matrix.shape[0], _SLICE):
        rows = matrix[begin : begin + _SLICE].detach().float()
        scale = rows.abs().amax(dim=1) / LEVELS
        scales[begin : begin + _SLICE] = scale
        values[begin : begin + _SLICE] = (rows / scale.clamp(min=torch.finfo(torch.float).tiny)[:, None]).round()
    return Int8Weight(values, scales)


def linear(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """Multiply `x` (rows, in) by the matrix, with `x` rounded to int8, like the native kernel but in torch.

    The float32 product of rounded values equals integer arithmetic up to float32's rounding.
    """
    return F.linear(round_activations(x), weight.values.to(x.dtype)) * weight.scales.to(x.dtype)


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """`x` (rows, n) rounded to 255 levels, scaled by the largest magnitude in each group of `GROUP` values."""
    n = x.shape[1]
    groups = F.pad(x, (0, -n % GROUP)).unflatten(1, (-1, GROUP))
    top = groups.abs().amax(dim=2, keepdim=True)
    scale = top / LEVELS
    inverse = torch.where(top > 1e-30, LEVELS / top, 0.0)
    return ((groups * inverse).round() * scale).flatten(1)[:, :n]
