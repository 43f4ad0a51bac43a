"""PostgreSQL away under load: usage goes to the spool, then clean 503s; afterwards nothing is lost or doubled."""

from __future__ import annotations

import pytest

from tests.service.chaos import session
from tests.service.chaos.outage import Outage
from tests.service.chaos.stand import Shape, Stand

pytestmark = [pytest.mark.service, pytest.mark.slow]

# By default keys get 503 after five seconds, and the limiter's lease ends after twenty.
RIDES_IT_OUT = {"key_staleness_s": 60, "outage_grace_s": 60}
FUNDS = 10**10  # nano-units: what is held while the database is away counts against the balance


async def outage(seconds: float, *, spool_max_bytes: int | None) -> dict[str, int]:
    """What clients got, by kind. Every reply that the outage explains is fine, the books must be exact."""
    settings = {"settle_timeout_s": 1.0}
    if spool_max_bytes is not None:
        settings["spool_max_bytes"] = spool_max_bytes
    shape = Shape("postgresql", stub=True, gateways=2, settings=settings, args=RIDES_IT_OUT)
    away = Outage(seconds, before_s=6, after_s=4)  # a new limiter admits after 3 s
    with Stand(shape) as stand:
        report = await session.run(stand, away, mode="outage", seed=1, clients=12, credit=FUNDS, top_up=0, settled_s=60)
        away.judge(report, low_bound=spool_max_bytes is not None)
        stand.keep = bool(report.problems)
    assert report.problems == [], report.text()
    assert report.figures["usages received while the database was away"] > 0
    return report.answers


async def test_a_spool_takes_what_it_can_then_503_and_nothing_is_lost_or_doubled() -> None:
    answers = await outage(6, spool_max_bytes=8192)
    assert answers["503"] > 0


@pytest.mark.long
async def test_a_spool_with_room_takes_everything_and_no_request_is_refused() -> None:
    answers = await outage(10, spool_max_bytes=None)
    assert "503" not in answers
