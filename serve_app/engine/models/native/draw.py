"""Draws tokens in C++: one call for what torch takes a dozen passes over all logits for."""

from __future__ import annotations

import ctypes

import torch

from serve_app.engine.models.native import library as native
from serve_app.engine.sampling.draw import LEAST_WEIGHT, FirstDraw


class NativeDraw:
    """`draw.Native` for the CPU, on at most `threads` threads; `library` is what `library.load` gave."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._threads = threads

    def draw(self, blocks: torch.Tensor, steepness: list[float], uniform: list[float]) -> FirstDraw:
        """A token of each row; the same as torch's path for the same numbers, but for the rounding of exp."""
        assert blocks.is_contiguous()
        rows, count, _ = blocks.shape
        peaks, sums = torch.empty(rows, count), torch.zeros(rows, count)
        tokens, drawn = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        scale, numbers = torch.tensor(steepness), torch.tensor(uniform, dtype=torch.float64)
        what = native.Draw(
            *(tensor.data_ptr() for tensor in (blocks, peaks, sums, scale, numbers, tokens, drawn)),
            rows=rows,
            blocks=count,
            least=LEAST_WEIGHT,
            threads=min(self._threads, rows),
        )
        self._library.native_draw(ctypes.byref(what))
        return FirstDraw(tokens, drawn, peaks, sums)
