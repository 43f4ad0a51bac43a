"""Computes the figures of a run from its replies: rates, waiting times, and times per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.harness.replies import Reply

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Load:
    """One load on one server, between `began_at` and `ended_at` (seconds of one clock)."""

    seconds: float
    tokens: int
    tokens_per_s: float
    ttft_s: tuple[float, ...]  # per request; without a token: seconds until the load was stopped
    unanswered: int  # requests without a token: their waits in `ttft_s` are lower bounds
    token_s: tuple[float, ...]  # seconds per output token after the first, one figure per request
    finished: int
    early: int  # finished with fewer tokens than were asked for
    cached_tokens: int
    problems: tuple[str, ...]


def tokens_of(reply: Reply, count: CountTokens) -> int:
    """Output tokens of the reply, as reported by the server. If the reply was interrupted, counts those of its text."""
    return reply.completion_tokens if reply.completion_tokens is not None else count(reply.text)


def load_figures(replies: Sequence[Reply], began_at: float, ended_at: float, count: CountTokens) -> Load:
    """Returns the figures of a load whose open requests were cancelled at `ended_at`."""
    sent = [reply for reply in replies if reply.problem is None and reply.sent_at < ended_at]
    tokens = [tokens_of(reply, count) for reply in sent]
    seconds = ended_at - began_at
    per_token = []
    for reply, number in zip(sent, tokens, strict=True):
        # Replies of fewer than 8 tokens are left out: they may arrive in one piece, without any time between tokens.
        if number >= 8 and reply.first_at is not None and reply.last_at is not None and reply.last_at > reply.first_at:
            per_token.append((reply.last_at - reply.first_at) / (number - 1))
    return Load(
        seconds=seconds,
        tokens=sum(tokens),
        tokens_per_s=sum(tokens) / seconds if seconds > 0 else 0.0,
        ttft_s=tuple((reply.first_at or ended_at) - reply.sent_at for reply in sent),
        unanswered=sum(reply.first_at is None for reply in sent),
        token_s=tuple(per_token),
        finished=sum(reply.ended_at is not None for reply in sent),
        early=sum(
            reply.ended_at is not None and number < reply.max_tokens for reply, number in zip(sent, tokens, strict=True)
        ),
        cached_tokens=sum(reply.cached_tokens or 0 for reply in sent),
        problems=tuple(sorted({reply.problem for reply in replies if reply.problem is not None})),
    )


def stream_rate(replies: Sequence[Reply], start: float, end: float, count: CountTokens) -> float:
    """Mean tokens per second of a stream between `start` and `end`."""
    if end <= start or not replies:
        return 0.0
    arrived = sum(count(reply.text_until(end)) - count(reply.text_until(start)) for reply in replies)
    return arrived / (end - start) / len(replies)


def longest_pause(reply: Reply, start: float, end: float) -> float:
    """Seconds of a stream's longest pause between `start` and `end`."""
    times = [start, *(at for at, _ in reply.texts if start < at < end), end]
    return max(later - earlier for earlier, later in pairwise(times))


def floor_share(weight_bytes: int, bytes_per_s: float, token_s: float) -> float:
    """Divides the time that one read of all weights from memory takes by a stream's time per token.

    A decode step reads each weight once, for any batch size. At a ratio of 1, memory bandwidth is the only limit. A
    server that accepts several drafted tokens in a step can exceed 1.
    """
    return weight_bytes / bytes_per_s / token_s
