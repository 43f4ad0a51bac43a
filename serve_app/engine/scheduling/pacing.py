"""Limits the prompt tokens of a step while other sequences stream, from the measured cost of steps."""

from __future__ import annotations

_SLOWDOWN = 2.0  # maximum ratio of a step with prompt tokens to a step without: streams keep half of their speed
_SMOOTHING = 0.25  # weight of a new measurement
_SMOOTHING_DOWN = 0.75  # weight of a faster decoding step: other work on the machine can only make steps slower
_REMEASURE = 64  # steps with prompt tokens after which the cost of a step without them is measured again
_NEAR = 1.5  # a cost measured for N rows is valid from N / this to N * this rows
_FIRST_TRY = 64  # prompt tokens per step while their cost is unknown
_IDLE_S = 0.02  # target duration of a step without streams; a prompt that arrives in the step waits about this long
_IDLE_STEPS = 1.5  # lower bound of that target, in decoding steps of one stream: shorter steps hardly compute prompts
_MAX_OWED = 32.0  # maximum number of steps without prompt tokens after a step with them


class PrefillPacer:
    """Chooses chunks so that steps take on average at most twice as long as their decoding rows alone.

    Deep in a long prompt, a step takes longer even with the smallest chunk, because reading the prompt's K and V takes
    as long for one new token as for sixteen. Smaller chunks would not be faster. So the pacer records the excess time
    of such a step as a debt to the streams and repays it with steps without prompt tokens.

    `observe` receives every step. The decoding cost is kept per number of rows, because it grows with them but not in
    proportion. If the cost is unknown or stale, one step without prompt tokens measures it: at most one step in 65
    while the number of rows stays between two consecutive powers of two. `smallest` and `largest` bound the chunk, in
    tokens.

    Without streams, a step of long prompts takes about _IDLE_S, so another account's short prompt does not wait long.
    (On a CPU, chunks of more than 16 tokens hardly lower the cost per token.)
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest = min(smallest, largest)
        self._largest = largest
        self._decode_s: dict[int, float] = {}  # rows → seconds
        self._measured: dict[int, int] = {}  # rows → `_mixed_steps` at the last measurement
        self._mixed_steps = 0  # planned steps with prompt tokens
        self._tried: dict[int, int] = {}  # bit length of the rows → `_mixed_steps` when a measurement was planned
        self._token_s: float | None = None  # seconds that a prompt token adds
        self._owed_s = 0.0  # excess time still to be repaid to the streams
        self._idle_token_s: float | None = None  # seconds per prompt token in a step without streams

    def chunk(self, rows: int) -> int:
        """Prompt tokens for a step that also decodes `rows` >= 1 sequences; 0 means that the step only decodes."""
        decode_s = self._estimate(rows)
        if decode_s is not None and self._owed_s > 0.5 * decode_s:
            return 0
        size = rows.bit_length()
        if decode_s is None and self._mixed_steps - self._tried.get(size, -_REMEASURE) >= _REMEASURE:
            self._tried[size] = self._mixed_steps  # counts as tried even if the step yields no measurement
            return 0
        self._mixed_steps += 1
        if decode_s is None or self._token_s is None:
            return self._bounded(_FIRST_TRY)
        return self._bounded((_SLOWDOWN - 1) * decode_s / self._token_s)

    def idle_chunk(self) -> int:
        """Tokens of long prompts for a step that decodes nothing."""
        if self._idle_token_s is None:
            return min(self._largest, _FIRST_TRY)
        target_s = max(_IDLE_S, _IDLE_STEPS * (self._estimate(1) or 0.0))
        return self._bounded(target_s / self._idle_token_s)

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Record the duration of a step that computed `rows` decoding sequences and `prompt_tokens` prompt tokens."""
        if seconds <= 0:
            return
        if not rows:
            if prompt_tokens >= self._smallest:  # smaller chunks would mislead: they cost more per token
                new, old = seconds / prompt_tokens, self._idle_token_s
                self._idle_token_s = new if old is None else _smoothed(old, new, _SMOOTHING)
            return
        if not prompt_tokens:
            self._owed_s = max(0.0, self._owed_s - (_SLOWDOWN - 1) * seconds)
            old = self._decode_s.get(rows, seconds)
            self._decode_s[rows] = _smoothed(old, seconds, _SMOOTHING if seconds > old else _SMOOTHING_DOWN)
            self._measured[rows] = self._mixed_steps
        elif (decode_s := self._estimate(rows)) is not None:
            # If the step was as fast as its decoding rows alone, a prompt token costs almost nothing.
            new = max(seconds - decode_s, 0.01 * seconds) / prompt_tokens
            self._token_s = new if self._token_s is None else _smoothed(self._token_s, new, _SMOOTHING)
            if prompt_tokens <= self._smallest:  # a larger chunk adds no debt: the next one adapts
                owed_s = self._owed_s + seconds - _SLOWDOWN * decode_s
                self._owed_s = min(max(0.0, owed_s), _MAX_OWED * decode_s)

    def _estimate(self, rows: int) -> float | None:
        """Seconds for a step that only decodes `rows` sequences, from the nearest number that was recently measured.

        None if no measured number is near.

        Assumes that fewer rows cost proportionally less, and that more rows cost the same. So it errs on the low side.
        """
        fresh = [r for r, at in self._measured.items() if self._mixed_steps - at < _REMEASURE]
        near = min(fresh, key=lambda r: abs(r - rows), default=0)
        if not rows <= _NEAR * near <= _NEAR * _NEAR * rows:
            return None
        return self._decode_s[near] * min(1.0, rows / near)

    def _bounded(self, tokens: float) -> int:
        return int(min(max(tokens, self._smallest), self._largest))


def _smoothed(old: float, new: float, weight: float) -> float:
    """A moving average that limits the effect of an outlier, such as a step while the machine was busy."""
    return old + weight * (min(max(new, old / 4), old * 4) - old)
