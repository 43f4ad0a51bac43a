"""PostgreSQL away under load, and little room in the spools: clean 503s, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio

import pytest

from tests.service.chaos import session
from tests.service.chaos.session import Session
from tests.service.chaos.stand import Shape, Stand

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

FUNDS = 10**10  # nano-units: what is held while the database is away counts against the balance


async def test_a_spool_takes_what_it_can_then_503_and_nothing_is_lost_or_doubled() -> None:
    shape = Shape(
        "postgresql",
        stub=True,
        gateways=2,
        settings={"settle_timeout_s": 1.0, "spool_max_bytes": 8192},
        args={"key_staleness_s": 600, "outage_grace_s": 600},
    )

    async def outage(running: Session) -> None:
        assert running.stand.postgres is not None
        await running.more(20)
        await asyncio.to_thread(running.stand.postgres.kill)
        await running.more(1)
        await running.until(lambda: running.tally.answers["503"] > 0)
        await asyncio.to_thread(running.stand.postgres.start)
        await running.more(40)

    with Stand(shape) as stand:
        report = await session.run(
            stand, outage, mode="outage", seed=1, clients=12, credit=FUNDS, top_up=0, settled_s=300
        )
    assert report.problems == [], report.text()
    assert set(report.answers) <= {"200", "402", "503", "hung up", "error event overloaded_error"}, report.text()


async def test_a_spool_with_room_takes_everything_and_no_request_is_refused() -> None:
    shape = Shape(
        "postgresql",
        stub=True,
        gateways=2,
        settings={"settle_timeout_s": 1.0},
        args={"key_staleness_s": 600, "outage_grace_s": 600},
    )

    async def outage(running: Session) -> None:
        assert running.stand.postgres is not None
        await running.more(20)
        await asyncio.to_thread(running.stand.postgres.kill)
        await running.more(40)
        await asyncio.to_thread(running.stand.postgres.start)
        await running.more(40)

    with Stand(shape) as stand:
        report = await session.run(
            stand, outage, mode="outage", seed=1, clients=12, credit=FUNDS, top_up=0, settled_s=300
        )
    assert report.problems == [], report.text()
    assert set(report.answers) <= {"200", "402", "hung up"}, report.text()
