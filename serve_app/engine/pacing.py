"""How many prompt tokens a step may take while others stream, from what steps were measured to cost."""

from __future__ import annotations

_SLOWDOWN = 2.2  # of a step with prompt tokens, against one without: streams keep over a third of their speed
_SMOOTHING = 0.25  # weight of a new measurement
_SMOOTHING_DOWN = 0.75  # of a decoding step that was faster: a machine that does other things only makes it slower
_REMEASURE = 64  # steps with prompt tokens after which the cost of one without is measured again
_FIRST_TRY = 64  # prompt tokens, while nothing is known of their cost


class PrefillPacer:
    """Chooses chunks such that a step takes at most 2.2 times what its decoding rows take alone.

    Every step is told to `observe`. Costs of decoding are kept per power of two of rows, because they grow with the
    rows, and not in proportion. Where the cost is unknown or old, one step without prompt tokens measures it: that is
    at most one in 65. `smallest` and `largest` bound the chunk, in tokens.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest = min(smallest, largest)
        self._largest = largest
        self._decode_s: dict[int, float] = {}  # power of two of the rows → seconds
        self._age: dict[int, int] = {}  # the same → steps with prompt tokens since it was measured or tried
        self._token_s: float | None = None  # seconds that a prompt token adds

    def chunk(self, rows: int) -> int:
        """Prompt tokens for a step that also decodes `rows` >= 1 sequences; 0: measure the rows alone."""
        size = rows.bit_length()
        if self._age.get(size, _REMEASURE) >= _REMEASURE:
            self._age[size] = 0  # tried once, whatever becomes of the step
            return 0
        self._age[size] += 1
        decode_s = self._decode_s.get(size)
        if decode_s is None or self._token_s is None:
            return self._bounded(_FIRST_TRY)
        return self._bounded((_SLOWDOWN - 1) * decode_s / self._token_s)

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn what a step of `rows` decoding sequences and `prompt_tokens` took."""
        size = rows.bit_length()
        if not rows or seconds <= 0:
            return
        if not prompt_tokens:
            old = self._decode_s.get(size, seconds)
            self._decode_s[size] = _smoothed(old, seconds, _SMOOTHING if seconds > old else _SMOOTHING_DOWN)
            self._age[size] = 0
        elif size in self._decode_s:
            # A step that was no slower than the rows alone still tells that a token costs next to nothing.
            extra = max(seconds - self._decode_s[size], 0.01 * seconds)
            new = extra / prompt_tokens
            self._token_s = new if self._token_s is None else _smoothed(self._token_s, new, _SMOOTHING)

    def _bounded(self, tokens: float) -> int:
        return int(min(max(tokens, self._smallest), self._largest))


def _smoothed(old: float, new: float, weight: float) -> float:
    """A moving average that one outlier, a step during which the machine did something else, can't carry away."""
    return old + weight * (min(max(new, old / 4), old * 4) - old)
