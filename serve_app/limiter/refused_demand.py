"""What pressure has refused on one backend, as demand: an autoscaler that sees only what runs never sees it."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

WINDOW_S: Final = 10.0  # of the rate
SAME_S: Final = 60.0  # a request of the same size, of the same account, within this time is a retry


class RefusedDemand:
    """Counts each refused request once, however often it is tried, and no account for more than it may use.

    A retry can't be recognised for certain. One of the same account with the same prompt and output budget is taken
    for one; otherwise clients that try again would look like many. The bound by account keeps one that only refuses to
    be refused from starting replicas: it counts for what its contract gives it.
    """

    def __init__(self) -> None:
        self._refused: deque[tuple[float, str, float]] = deque()  # time, account, tokens
        self._of_account: Counter[str] = Counter()
        self._seen: dict[tuple[str, int, int], float] = {}  # by account, prompt, output budget; oldest first
        self._sum = 0.0

    def add(self, account_id: str, size: tuple[int, int], tokens: float, most_per_s: float, now: float) -> None:
        """Counts a refusal of `tokens`. `size` is the prompt's tokens and the output budget."""
        self._forget(now)
        key = (account_id, *size)
        if self._seen.pop(key, None) is None:
            counted = min(tokens, most_per_s * WINDOW_S - self._of_account[account_id])
            if counted > 0:
                self._refused.append((now, account_id, counted))
                self._of_account[account_id] += counted  # type: ignore[assignment]
                self._sum += counted
        self._seen[key] = now

    def rate(self, now: float) -> float:
        """Tokens per second that were refused in the last seconds."""
        self._forget(now)
        return self._sum / WINDOW_S if self._refused else 0.0

    def _forget(self, now: float) -> None:
        while self._refused and now - self._refused[0][0] > WINDOW_S:
            _, account_id, tokens = self._refused.popleft()
            self._sum -= tokens
            self._of_account[account_id] -= tokens  # type: ignore[assignment]
            if self._of_account[account_id] <= 1e-6:
                del self._of_account[account_id]
        while self._seen and now - next(iter(self._seen.values())) > SAME_S:
            del self._seen[next(iter(self._seen))]
