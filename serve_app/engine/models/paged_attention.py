"""Paged attention in torch: packs a step's tokens into one row and computes their attention.

The step object knows the sequence of each token. Models that run in transformers' code receive it as the argument
`paged` of the forward call, and call `paged_attention` in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from serve_app.engine.models.kv_cache import KVCache, LayerShape
from serve_app.engine.scheduling.sequence import Chunk

NAME = "serve_app_paged"

# Sequences are decoded together if the longest has at most _PADDING times the length of the shortest, or at most
# _PADDING_TOKENS more tokens.
_PADDING = 1.5
_PADDING_TOKENS = 64


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: PagedStep | ProbeStep | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention interface: query, key and value are (1, heads, T, size).

    Returns (1, T, heads, size).

    Raises:
        NotImplementedError: the model does not pass `paged` on.
    """
    if paged is None:
        raise NotImplementedError("the model's code does not pass attention arguments on")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return paged.attend(layer, q, k, v, Scores(scale, sliding_window, softcap, s_aux))[None], None


@dataclass(frozen=True, slots=True)
class Scores:
    """Parameters that turn products of queries and keys into a layer's attention weights."""

    scale: float
    window: int | None = None  # number of tokens that each token sees, including itself; None: all up to itself
    cap: float | None = None  # Gemma 2: limit that the scores approach but never exceed
    sinks: torch.Tensor | None = None  # GPT-OSS, (heads,): the score of one additional token without a value

    @property
    def are_plain(self) -> bool:
        """Whether torch has kernels for these scores."""
        return self.cap is None and self.sinks is None


# Transformers has no mask function of this name, so its mask code returns None.
AttentionInterface.register(NAME, paged_attention)


class ProbeStep:
    """Replaces `PagedStep` in a forward pass without a cache; records what each layer would store."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        self.layers[layer] = LayerShape(
            (key.shape[1], key.shape[2]), (value.shape[1], value.shape[2]), key.dtype, key.device
        )
        return causal(query, key, value, scores.scale)


@dataclass
class DecodeGroup:
    """Rows `begin .. end` of the step: one token each, from sequences of similar length."""

    begin: int
    end: int
    block_tables: torch.Tensor  # (rows, blocks), padded with each row's last block
    lengths: torch.Tensor  # (rows,)
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, block_size: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask (rows, 1, 1, padded length): each row's token sees its own sequence, within the window."""
        if window not in self.masks:
            positions = torch.arange(self.block_tables.shape[1] * block_size, device=self.lengths.device)
            lengths = self.lengths[:, None]
            visible = positions < lengths
            if window is not None:
                visible &= positions >= lengths - window
            self.masks[window] = additive_mask(visible, dtype)[:, None, None]
        return self.masks[window]


@dataclass
class PrefillSpan:
    """Rows `begin .. end` of the step: consecutive tokens of one sequence, the first at position `start`."""

    begin: int
    end: int
    start: int
    block_table: torch.Tensor  # (blocks,)
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of the sequence's tokens up to the span's end."""
        return self.start + self.end - self.begin

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive causal mask (rows, length); made once per step and shared by all layers."""
        if window not in self.masks:
            device = self.block_table.device
            rows = torch.arange(self.start, self.length, device=device)[:, None]
            columns = torch.arange(self.length, device=device)
            visible = columns <= rows
            if window is not None:
                visible &= columns > rows - window
            self.masks[window] = additive_mask(visible, dtype)
        return self.masks[window]


class PagedStep:
    """The attention of one step over the paged cache; `chunks` are in the order of `PackedChunks`."""

    def __init__(self, cache: KVCache, chunks: list[Chunk]) -> None:
        self.cache = cache
        self.chunks = chunks
        self._on_device: dict[torch.device, tuple[torch.Tensor, list[DecodeGroup], list[PrefillSpan]]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Store the step's K and V, then let each sequence attend over its own tokens.

        `query`, `key` and `value` are (T, heads, size). Returns (T, heads, size of a value head).
        """
        if query.device not in self._on_device:
            self._on_device[query.device] = self._lay_out(query.device)
        slots, groups, spans = self._on_device[query.device]
        k_cache, v_cache = self.cache.layers[layer]
        k_cache.flatten(0, 1).index_copy_(0, slots, key)
        v_cache.flatten(0, 1).index_copy_(0, slots, value)
        parts = [self._decode(group, query, k_cache, v_cache, scores) for group in groups]
        parts += [self._prefill(span, query, key, value, (k_cache, v_cache), scores) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self,
        group: DecodeGroup,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        rows = group.end - group.begin
        heads, kv_heads = query.shape[1], k_cache.shape[2]
        flat = group.block_tables.flatten()
        # (rows, kv heads, length, size): the query heads that share a K/V head become rows of a matrix, without a copy.
        k = k_cache.index_select(0, flat).view(rows, -1, *k_cache.shape[2:]).transpose(1, 2)
        v = v_cache.index_select(0, flat).view(rows, -1, *v_cache.shape[2:]).transpose(1, 2)
        q = query[group.begin : group.end].reshape(rows, kv_heads, heads // kv_heads, -1)
        mask = group.mask(self.cache.block_size, scores.window, query.dtype)
        sinks = None if scores.sinks is None else scores.sinks.view(1, kv_heads, -1, 1)
        return masked(q, k, v, mask, scores, sinks).reshape(rows, heads, -1)

    def _prefill(
        self,
        span: PrefillSpan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cached: tuple[torch.Tensor, torch.Tensor],
        scores: Scores,
    ) -> torch.Tensor:
        q = query[span.begin : span.end]
        is_plain = scores.window is None and scores.are_plain
        if span.start == 0 and is_plain:
            here = slice(span.begin, span.end)
            return causal(q, key[here], value[here], scores.scale)
        k, v = (c.index_select(0, span.block_table).flatten(0, 1)[: span.length] for c in cached)
        if is_plain and q.is_cuda:
            return causal(q, k, v, scores.scale)
        # GPU kernels with masks do not support grouped heads, so K and V are expanded per query head, without a copy.
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (t.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for t in (k, v))
        q = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
        mask = span.mask(scores.window, q.dtype)[None, None]
        sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, group, 1, 1)
        return masked(q, k, v, mask, scores, sinks).permute(2, 0, 1, 3).flatten(1, 2)

    def _lay_out(self, device: torch.device) -> tuple[torch.Tensor, list[DecodeGroup], list[PrefillSpan]]:
        """Convert block tables to index tensors on one device; once per step and device."""
        size = self.cache.block_size
        slots = [
            chunk.sequence.block_table[p // size] * size + p % size
            for chunk in self.chunks
            for p in range(chunk.start, chunk.start + chunk.length)
        ]
        singles = [chunk for chunk in self.chunks if chunk.length == 1]
        groups, row = [], 0
        for lengths in group_lengths([chunk.start + 1 for chunk in singles]):
            blocks = -(-lengths[-1] // size)
            tables = [c.sequence.block_table[:blocks] for c in singles[row : row + len(lengths)]]
            # Padding repeats the table's last block. It is masked, but 0 * NaN is NaN, and other blocks may hold NaN.
            padded = torch.tensor([t + t[-1:] * (blocks - len(t)) for t in tables], device=device)
            groups.append(DecodeGroup(row, row + len(lengths), padded, torch.tensor(lengths, device=device)))
            row += len(lengths)
        spans = []
        for chunk in self.chunks[len(singles) :]:
            blocks = -(-(chunk.start + chunk.length) // size)
            table = torch.tensor(chunk.sequence.block_table[:blocks], device=device)
            spans.append(PrefillSpan(row, row + chunk.length, chunk.start, table))
            row += chunk.length
        return torch.tensor(slots, device=device), groups, spans


def group_lengths(lengths: list[int]) -> list[list[int]]:
    """Split ascending lengths into runs whose longest and shortest lengths differ little, to limit the padding."""
    groups: list[list[int]] = []
    for length in lengths:
        if groups and length <= max(groups[-1][0] * _PADDING, groups[-1][0] + _PADDING_TOKENS):
            groups[-1].append(length)
        else:
            groups.append([length])
    return groups


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute the attention of a sequence's last T tokens over all of its tokens.

    `query` is (T, heads, size); `key` and `value` are (length, K/V heads, size). Creates no mask if the device has a
    suitable kernel. The CPU has one only for T = length.
    """
    q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
    if len(query) == len(key):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        bias = causal_lower_right(len(query), len(key))
        out = F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scores: Scores, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention (…, rows, size) of `q` (…, rows, size) over `k` and `v` (…, length, size); `mask` is added to scores.

    `sinks` are the sinks of `scores`, in a shape that can be expanded to (…, rows, 1).
    """
    if scores.are_plain:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scores.scale)
    products = (q @ k.transpose(-1, -2)).float() * scores.scale
    if scores.cap is not None:
        products = torch.tanh(products / scores.cap) * scores.cap
    products = products + mask
    if sinks is not None:
        products = torch.cat([products, sinks.float().expand(*products.shape[:-1], 1)], dim=-1)
    return (products.softmax(dim=-1)[..., : k.shape[-2]]).to(v.dtype) @ v


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `visible`, minus infinity elsewhere; added to scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """The tokens of a step, one after another, and the rows of the logits to return."""

    chunks: list[Chunk]  # as packed: one-token chunks before longer ones, each kind by `start`
    token_ids: list[int]
    positions: list[int]  # each token's position in its sequence
    classes: list[int]  # length class of each token's sequence
    keep: list[int]  # rows of the tokens whose logits are returned, in the order of `pack`'s argument


def pack(chunks: Sequence[Chunk]) -> PackedChunks:
    """Pack chunks so that sequences of similar length are adjacent."""
    order = sorted(range(len(chunks)), key=lambda i: (chunks[i].length > 1, chunks[i].start))
    packed = PackedChunks([chunks[i] for i in order], [], [], [], [])
    last_row: dict[int, int] = {}
    for index, chunk in zip(order, packed.chunks, strict=True):
        packed.token_ids.extend(chunk.token_ids)
        packed.positions.extend(range(chunk.start, chunk.start + chunk.length))
        packed.classes.extend([chunk.sequence.length_class] * chunk.length)
        last_row[index] = len(packed.token_ids) - 1
    for index, chunk in enumerate(chunks):
        packed.keep.extend(last_row[index] - back for back in reversed(range(chunk.num_logits)))
    return packed
