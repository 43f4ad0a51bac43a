"""A steady stream of settlements through outages of PostgreSQL: nothing is lost or billed twice, and it comes back."""

from __future__ import annotations

import pytest

from .outage import measure

OUTAGE_S = 20.0
RATE = 100  # the module itself measures at 300; a busy machine of two cores does not keep up with that


@pytest.mark.slow
# The module itself measures the others too.
@pytest.mark.parametrize("kind", ["silent", pytest.param("failover", marks=pytest.mark.long)])
async def test_settlements_survive_an_outage_at_a_steady_rate(on_postgres: str, kind: str) -> None:
    report = await measure(on_postgres, kind, OUTAGE_S, RATE)
    assert report.recorded == report.settlements
    assert report.billed_exactly
    assert report.books_agree
    assert report.p99_after_30_s < max(1.0, 3 * report.calm_p99_s), report
    assert report.look_up_after_s < 20
    assert report.most_threads < 30
    assert report.most_connections < 60
    assert report.memory_most_mib < report.memory_before_mib + 100
