"""How many prompt tokens a step may take while others stream, from what steps were measured to cost."""

from __future__ import annotations

_SLOWDOWN = 2.0  # of a step with prompt tokens, against one without: streams keep half of their speed
_SMOOTHING = 0.25  # weight of a new measurement
_SMOOTHING_DOWN = 0.75  # of a decoding step that was faster: a machine that does other things only makes it slower
_REMEASURE = 64  # steps with prompt tokens after which the cost of one without is measured again
_NEAR = 1.5  # times more or less rows tell what some rows cost
_FIRST_TRY = 64  # prompt tokens, while nothing is known of their cost
_MOST_OWED = 32.0  # steps without prompt tokens that one with them can be followed by


class PrefillPacer:
    """Chooses chunks such that steps take on average at most twice what their decoding rows take alone.

    Deep in a long prompt even the smallest chunk takes longer: reading what the prompt has so far costs the same for
    one token of it as for sixteen. What such a step took too much is owed to the streams, and paid back in steps
    without prompt tokens, instead of chunks that become ever smaller and no cheaper.

    Every step is told to `observe`. Costs of decoding are kept by the number of rows, because they grow with it, and
    not in proportion. Where the cost is unknown or old, one step without prompt tokens measures it: at most one in 65
    while the rows stay within a power of two. `smallest` and `largest` bound the chunk, in tokens.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest = min(smallest, largest)
        self._largest = largest
        self._decode_s: dict[int, float] = {}  # rows → seconds
        self._measured: dict[int, int] = {}  # rows → `_mixed_steps` when they were measured
        self._mixed_steps = 0  # that were planned
        self._tried: dict[int, int] = {}  # power of two of the rows → `_mixed_steps` when they were to be measured
        self._token_s: float | None = None  # seconds that a prompt token adds
        self._owed_s = 0.0  # to the streams

    def chunk(self, rows: int) -> int:
        """Prompt tokens for a step that also decodes `rows` >= 1 sequences; 0: the rows alone."""
        decode_s = self._estimate(rows)
        if decode_s is not None and self._owed_s > 0.5 * decode_s:
            return 0
        size = rows.bit_length()
        if decode_s is None and self._mixed_steps - self._tried.get(size, -_REMEASURE) >= _REMEASURE:
            self._tried[size] = self._mixed_steps  # once, whatever becomes of the step
            return 0
        self._mixed_steps += 1
        if decode_s is None or self._token_s is None:
            return self._bounded(_FIRST_TRY)
        return self._bounded((_SLOWDOWN - 1) * decode_s / self._token_s)

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn what a step of `rows` decoding sequences and `prompt_tokens` took."""
        if not rows or seconds <= 0:
            return
        if not prompt_tokens:
            self._owed_s = max(0.0, self._owed_s - (_SLOWDOWN - 1) * seconds)
            old = self._decode_s.get(rows, seconds)
            self._decode_s[rows] = _smoothed(old, seconds, _SMOOTHING if seconds > old else _SMOOTHING_DOWN)
            self._measured[rows] = self._mixed_steps
        elif (decode_s := self._estimate(rows)) is not None:
            # A step that was no slower than the rows alone still tells that a token costs next to nothing.
            new = max(seconds - decode_s, 0.01 * seconds) / prompt_tokens
            self._token_s = new if self._token_s is None else _smoothed(self._token_s, new, _SMOOTHING)
            if prompt_tokens <= self._smallest:  # larger chunks follow what they cost
                owed_s = self._owed_s + seconds - _SLOWDOWN * decode_s
                self._owed_s = min(max(0.0, owed_s), _MOST_OWED * decode_s)

    def _estimate(self, rows: int) -> float | None:
        """Seconds of a step of `rows` alone: of the nearest number of rows that was measured lately, if one is near.

        Fewer rows are taken to cost less in proportion, more to cost the same: too little rather than too much.
        """
        fresh = [r for r, at in self._measured.items() if self._mixed_steps - at < _REMEASURE]
        near = min(fresh, key=lambda r: abs(r - rows), default=0)
        if not rows <= _NEAR * near <= _NEAR * _NEAR * rows:
            return None
        return self._decode_s[near] * min(1.0, rows / near)

    def _bounded(self, tokens: float) -> int:
        return int(min(max(tokens, self._smallest), self._largest))


def _smoothed(old: float, new: float, weight: float) -> float:
    """A moving average that one outlier, a step during which the machine did something else, can't carry away."""
    return old + weight * (min(max(new, old / 4), old * 4) - old)
