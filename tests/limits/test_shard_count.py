"""Who counts the limiter shards otherwise lets nothing in, and nobody does while such a one has requests open."""

from __future__ import annotations

import pytest

from serve_app.limits import Renew, ShardsDiffer
from serve_app.limits.shard_count import ShardCount

LEASE_S = 10.0


class Limiter:
    """One shard of three, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = ShardCount(3, lambda: self.now, LEASE_S)

    def hear(self, shards: int, open_requests: int = 0) -> ShardsDiffer | None:
        return self.count.hear(Renew("g", (), shards, open_requests))


@pytest.fixture
def limiter() -> Limiter:
    return Limiter()


def test_who_counts_as_the_limiter_does_is_let_in(limiter: Limiter) -> None:
    assert limiter.hear(3, open_requests=7) is None


def test_who_counts_otherwise_is_told_and_bothers_nobody(limiter: Limiter) -> None:
    assert limiter.hear(1) == ShardsDiffer(shards=3, other=1)
    assert limiter.hear(3) is None


def test_while_one_that_counts_otherwise_has_requests_open_nobody_is_let_in(limiter: Limiter) -> None:
    limiter.hear(1, open_requests=2)
    for _ in range(5):
        limiter.now += LEASE_S / 2
        assert limiter.hear(3) == ShardsDiffer(shards=3, other=1)
        limiter.hear(1, open_requests=2)
    limiter.now += LEASE_S - 0.1  # it may have died: its requests are settled, or taken over, within the lease
    assert limiter.hear(3) is not None
    limiter.now += 0.1
    assert limiter.hear(3) is None
