"""A check of the rate buckets: in no interval do they grant more than rate times time plus one burst."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.contracts.rates import WINDOW_S

_SLACK = 1e-3  # units, for rounding


@dataclass
class _Granted:
    key_id: str
    at: float
    requests: int
    tokens: int


class Rates:
    """Every admission as one limiter's buckets saw it: what it was charged then and has not given back since."""

    def __init__(self, limits: dict[str, tuple[int, int]]) -> None:
        self._limits = limits  # requests and tokens a minute by key_id, and of the account under ""
        self._granted: dict[str, _Granted] = {}

    def admit(self, name: str, key_id: str, at: float, tokens: int) -> None:
        self._granted[name] = _Granted(key_id, at, 1, tokens)

    def correct(self, name: str, tokens: int) -> None:
        if name in self._granted:
            self._granted[name].tokens = min(self._granted[name].tokens, tokens)

    def undo(self, name: str) -> None:
        self._granted.pop(name, None)

    def check(self) -> None:
        for key_id, (rpm, tpm) in self._limits.items():
            granted = [one for one in self._granted.values() if key_id in ("", one.key_id)]
            for begin, one in enumerate(granted):
                requests = tokens = 0
                for other in granted[begin:]:
                    requests += other.requests
                    tokens += other.tokens
                    share = 1 + (other.at - one.at) / WINDOW_S
                    assert requests <= rpm * share + _SLACK
                    assert tokens <= tpm * share + _SLACK
