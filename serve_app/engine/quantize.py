"""Int8 weights and activations: a scale for each row of a matrix, a scale for each token's activations.

Both are symmetric in -127 .. 127 and the products are added up exactly in 32 bits, so a result is the same on every
machine and does not depend on what else is in the batch (docs/benchmarks.md has the measured quality).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention

LEVELS = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix (out, in) as `values * scales[:, None]`."""

    values: torch.Tensor  # int8 (out, in)
    scales: torch.Tensor  # float32 (out,)

    @property
    def shape(self) -> torch.Size:
        """Of the matrix: (out, in)."""
        return self.values.shape


def quantize_rows(matrix: torch.Tensor) -> Int8Weight:
    """Round each row to 255 levels of its largest magnitude; a row of zeros has the scale 0."""
    matrix = matrix.float()
    scales = matrix.abs().amax(dim=1) / LEVELS
    values = (matrix / scales.clamp(min=torch.finfo(torch.float).tiny)[:, None]).round().to(torch.int8)
    return Int8Weight(values, scales)


def linear(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """`x` (rows, in) times the matrix, with each row of `x` rounded to int8: the pure torch form of the native kernel.

    Sums of up to 1,040 products of full size are exact in float32, and longer ones of usual size too, so this gives
    what integer arithmetic gives.
    """
    scale = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / LEVELS
    rounded = (x / scale).round()
    return F.linear(rounded, weight.values.float()) * scale * weight.scales
