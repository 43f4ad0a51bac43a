"""A gateway with another number of shards admits nothing, and no other one does while it has requests open."""

from __future__ import annotations

import pytest

from serve_app.contracts.limiting import Renew, ShardsDiffer
from serve_app.limiter.shard_count import ShardCount

LEASE_S = 10.0


class Limiter:
    """One shard of three, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = ShardCount(3, lambda: self.now, LEASE_S)

    def hear(self, shards: int, open_requests: int = 0) -> ShardsDiffer | None:
        return self.count.objection(Renew("g", (), shards, open_requests))


@pytest.fixture
def limiter() -> Limiter:
    return Limiter()


def test_a_gateway_with_the_same_number_of_shards_may_admit(limiter: Limiter) -> None:
    assert limiter.hear(3, open_requests=7) is None


def test_a_gateway_with_another_number_must_not_admit_and_does_not_disturb_the_others(limiter: Limiter) -> None:
    assert limiter.hear(1) == ShardsDiffer(shards=3, other=1)
    assert limiter.hear(3) is None


def test_no_gateway_may_admit_while_one_with_another_number_has_requests_open(limiter: Limiter) -> None:
    limiter.hear(1, open_requests=2)
    for _ in range(5):
        limiter.now += LEASE_S / 2
        assert limiter.hear(3) == ShardsDiffer(shards=3, other=1)
        limiter.hear(1, open_requests=2)
    limiter.now += LEASE_S - 0.1  # it may have died: its requests are settled, or taken over, within the lease
    assert limiter.hear(3) is not None
    limiter.now += 0.1
    assert limiter.hear(3) is None
