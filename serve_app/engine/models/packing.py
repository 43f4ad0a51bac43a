"""Lays one step's chunks out as one row of tokens, in the order that paged attention wants."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from serve_app.engine.scheduling.sequence import Chunk


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """The tokens of a step, one behind the other, and which of their logits are wanted."""

    chunks: list[Chunk]  # as packed: those of one token first, by length
    token_ids: list[int]
    positions: list[int]  # of each token in its sequence
    classes: list[int]  # length class of each token's sequence
    keep: list[int]  # rows of the tokens whose logits are wanted, in the order in which the chunks were given


def pack(chunks: Seq[Chunk]) -> PackedChunks:
    """Order chunks so that sequences of like length lie together."""
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
