"""Limits the prompt tokens of a step while other sequences stream, from the measured cost of steps."""

from __future__ import annotations

_SLOWDOWN = 2.0  # of a step with prompt tokens, against one without: streams keep half of their speed
_SMOOTHING = 0.25  # weight of a new measurement
_SMOOTHING_DOWN = 0.75  # of a faster decoding step: other work on the machine can only make steps slower
_REMEASURE = 64  # steps with prompt tokens after which the cost of one without is measured again
_NEAR = 1.5  # the measured cost of some rows is valid for up to this many times more or fewer rows
_FIRST_TRY = 64  # prompt tokens, while their cost is unknown
_IDLE_S = 0.04  # of a step without streams: a prompt that comes meanwhile waits so long at most
_MAX_OWED = 32.0  # steps without prompt tokens after one with them, at most


class PrefillPacer:
    """Chooses chunks such that steps take on average at most twice what their decoding rows take alone.

    Deep in a long prompt even the smallest chunk takes longer, because reading the prompt's K and V costs the same for
    one new token as for sixteen. The excess of such a step is owed to the streams and paid back in steps without
    prompt tokens; smaller chunks would not be cheaper.

    `observe` receives every step. The cost of decoding is kept per number of rows, because it grows with them, but
    not in proportion. If the cost is unknown or old, one step without prompt tokens measures it: at most one step in
    65 while the rows stay within a power of two. `smallest` and `largest` bound the chunk, in tokens.

    Without streams a step of long prompts takes about _IDLE_S, so that another account's short one does not wait for
    long. On a CPU a token is hardly cheaper in chunks of more than 64.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest = min(smallest, largest)
        self._largest = largest
        self._decode_s: dict[int, float] = {}  # rows → seconds
        self._measured: dict[int, int] = {}  # rows → `_mixed_steps` when they were measured
        self._mixed_steps = 0  # planned steps with prompt tokens
        self._tried: dict[int, int] = {}  # power of two of the rows → `_mixed_steps` when they were to be measured
        self._token_s: float | None = None  # seconds that a prompt token adds
        self._owed_s = 0.0  # to the streams
        self._idle_token_s: float | None = None  # seconds of a prompt token in a step without streams

    def chunk(self, rows: int) -> int:
        """Prompt tokens for a step that also decodes `rows` >= 1 sequences; 0 means the rows alone."""
        decode_s = self._estimate(rows)
        if decode_s is not None and self._owed_s > 0.5 * decode_s:
            return 0
        size = rows.bit_length()
        if decode_s is None and self._mixed_steps - self._tried.get(size, -_REMEASURE) >= _REMEASURE:
            self._tried[size] = self._mixed_steps  # once, even if the step measures nothing
            return 0
        self._mixed_steps += 1
        if decode_s is None or self._token_s is None:
            return self._bounded(_FIRST_TRY)
        return self._bounded((_SLOWDOWN - 1) * decode_s / self._token_s)

    def idle_chunk(self) -> int:
        """Tokens of long prompts for a step that decodes nothing."""
        if self._idle_token_s is None:
            return min(self._largest, _FIRST_TRY)
        return self._bounded(_IDLE_S / self._idle_token_s)

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn the duration of a step of `rows` decoding sequences and `prompt_tokens`."""
        if seconds <= 0:
            return
        if not rows:
            if prompt_tokens >= self._smallest:  # fewer say nothing of many
                new, old = seconds / prompt_tokens, self._idle_token_s
                self._idle_token_s = new if old is None else _smoothed(old, new, _SMOOTHING)
            return
        if not prompt_tokens:
            self._owed_s = max(0.0, self._owed_s - (_SLOWDOWN - 1) * seconds)
            old = self._decode_s.get(rows, seconds)
            self._decode_s[rows] = _smoothed(old, seconds, _SMOOTHING if seconds > old else _SMOOTHING_DOWN)
            self._measured[rows] = self._mixed_steps
        elif (decode_s := self._estimate(rows)) is not None:
            # A step that was no slower than the rows alone shows that a token costs next to nothing.
            new = max(seconds - decode_s, 0.01 * seconds) / prompt_tokens
            self._token_s = new if self._token_s is None else _smoothed(self._token_s, new, _SMOOTHING)
            if prompt_tokens <= self._smallest:  # larger chunks follow what they cost
                owed_s = self._owed_s + seconds - _SLOWDOWN * decode_s
                self._owed_s = min(max(0.0, owed_s), _MAX_OWED * decode_s)

    def _estimate(self, rows: int) -> float | None:
        """Seconds of a step of `rows` alone, from the nearest number of rows with a recent measurement, if one is near.

        Fewer rows cost less in proportion, more rows cost the same: the estimate is rather too low than too high.
        """
        fresh = [r for r, at in self._measured.items() if self._mixed_steps - at < _REMEASURE]
        near = min(fresh, key=lambda r: abs(r - rows), default=0)
        if not rows <= _NEAR * near <= _NEAR * _NEAR * rows:
            return None
        return self._decode_s[near] * min(1.0, rows / near)

    def _bounded(self, tokens: float) -> int:
        return int(min(max(tokens, self._smallest), self._largest))


def _smoothed(old: float, new: float, weight: float) -> float:
    """A moving average that limits the effect of one outlier, such as a step during which the machine was busy."""
    return old + weight * (min(max(new, old / 4), old * 4) - old)
