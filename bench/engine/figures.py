"""From replies to figures: rates, waits, medians with their ranges. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.engine.replies import Reply

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest of what was measured."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None of nothing."""
        known = sorted(values)
        return cls(median(known), known[0], known[-1]) if known else None


@dataclass(frozen=True, slots=True)
class Load:
    """One load on one server: what came back between `began_at` and `ended_at` (seconds of one clock)."""

    seconds: float
    tokens: int
    tokens_per_s: float
    ttft_s: tuple[float, ...]  # of every request; of one without a token, how long it had waited when all was cut
    unanswered: int  # requests without a token: their waits in `ttft_s` are lower bounds
    token_s: tuple[float, ...]  # seconds per output token after the first, one figure per request
    finished: int
    early: int  # finished with fewer tokens than were asked for
    cached_tokens: int
    problems: tuple[str, ...]


def tokens_of(reply: Reply, count: CountTokens) -> int:
    """Output tokens: the server's own usage when it came, else (it was cut) those that the text has."""
    return reply.completion_tokens if reply.completion_tokens is not None else count(reply.text)


def load_figures(replies: Sequence[Reply], began_at: float, ended_at: float, count: CountTokens) -> Load:
    """Figures of a load whose requests were cut at `ended_at`."""
    sent = [reply for reply in replies if reply.problem is None and reply.sent_at < ended_at]
    tokens = [tokens_of(reply, count) for reply in sent]
    seconds = ended_at - began_at
    per_token = []
    for reply, number in zip(sent, tokens, strict=True):
        # A few tokens that arrive in one piece say nothing about the time between tokens.
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


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def stream_rate(replies: Sequence[Reply], start: float, end: float, count: CountTokens) -> float:
    """Tokens per second and stream that arrived between two moments."""
    if end <= start or not replies:
        return 0.0
    arrived = sum(count(reply.text_until(end)) - count(reply.text_until(start)) for reply in replies)
    return arrived / (end - start) / len(replies)


def longest_pause(reply: Reply, start: float, end: float) -> float:
    """Seconds of the longest silence of a stream between two moments."""
    times = [start, *(at for at, _ in reply.texts if start < at < end), end]
    return max(later - earlier for earlier, later in pairwise(times))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """Round by round, since what slows one of a round slows the other; rounds that one of both lacks are left out."""
    return Spread.of(a / b for a, b in zip(ours, theirs, strict=False) if b > 0)


def floor_share(weight_bytes: int, bytes_per_s: float, token_s: float) -> float:
    """What share of a stream's time per token it takes to read all weights once from memory (1 is the bound).

    Every step of a decoder reads each weight once, whatever the batch. A server that accepts several drafted tokens a
    step can exceed 1.
    """
    return weight_bytes / bytes_per_s / token_s
