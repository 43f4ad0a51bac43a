"""Paged attention against the plain formula, on random tensors."""

from __future__ import annotations

import math

import pytest
import torch

from serve_app.engine.models.kv_cache import KVCache, LayerShape
from serve_app.engine.models.paged_attention import PagedStep, Scores, causal, group_lengths
from serve_app.engine.scheduling.sequence import Chunk, TokenSequence
from tests.engine.fakes import request

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 8, 4


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    out = torch.empty_like(q)
    for row in range(len(q)):
        first = 0 if window is None else max(0, start + row + 1 - window)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            keys, values = k[first : start + row + 1, group], v[first : start + row + 1, group]
            out[row, head] = ((keys @ q[row, head]) / math.sqrt(SIZE)).softmax(0) @ values
    return out


@pytest.mark.parametrize("window", [None, 5])
def test_every_sequence_attends_to_its_own_tokens_only(window: int | None) -> None:
    torch.manual_seed(0)
    shape = LayerShape((KV_HEADS, SIZE), (KV_HEADS, SIZE), torch.float32, torch.device("cpu"))
    cache = KVCache({0: shape}, 64, BLOCK)
    free = torch.randperm(64).tolist()
    # start, tokens: two that decode, one alone in its length, a first chunk and a later one
    spans = [(3, 1), (9, 1), (150, 1), (0, 11), (6, 13)]
    chunks, queries, keys, values, expected = [], [], [], [], []
    for number, (start, count) in enumerate(spans):
        sequence = TokenSequence(request(str(number), [1] * (start + count)), number, 0.0, 1)
        sequence.block_table = [free.pop() for _ in range(-(-(start + count) // BLOCK))]
        chunks.append(Chunk(sequence, start, count))
        k, v = torch.randn(2, start + count, KV_HEADS, SIZE)
        for position in range(start):
            block, offset = sequence.block_table[position // BLOCK], position % BLOCK
            cache.layers[0][0][block, offset], cache.layers[0][1][block, offset] = k[position], v[position]
        queries.append(torch.randn(count, HEADS, SIZE))
        keys.append(k[start:])
        values.append(v[start:])
        expected.append(plain(queries[-1], k, v, start, window))
    step = PagedStep(cache, chunks)
    got = step.attend(0, torch.cat(queries), torch.cat(keys), torch.cat(values), Scores(SIZE**-0.5, window))
    assert torch.allclose(got, torch.cat(expected), atol=1e-5)


def test_sequences_are_padded_together_only_while_it_costs_little() -> None:
    assert group_lengths([1, 10, 65, 70, 500, 600, 5000]) == [[1, 10, 65], [70], [500, 600], [5000]]
    assert group_lengths([]) == []


@pytest.mark.parametrize("start", [0, 1, 17])
def test_later_tokens_attend_causally_without_a_mask_of_our_own(start: int) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, start + 9, KV_HEADS, SIZE)
    q = torch.randn(9, HEADS, SIZE)
    assert torch.allclose(causal(q, k, v, SIZE**-0.5), plain(q, k, v, start, None), atol=1e-5)
