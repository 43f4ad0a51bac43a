"""Measures the demand refused because of one backend's load. The replicas' reports do not show this demand."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

WINDOW_S: Final = 10.0  # window of the rate
SAME_S: Final = 60.0  # a request of the same account and size within this time is a retry


class RefusedDemand:
    """Counts each refused request once, however often it is retried, and each account at most up to its contract.

    A retry cannot be recognised with certainty. A request of the same account with the same prompt and output lengths
    counts as a retry. Otherwise a client that retries would look like many clients. Because of the limit per account,
    one account cannot make the autoscaler start replicas just by repeating refused requests.
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
        """Returns the tokens per second that were refused in the last WINDOW_S."""
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
