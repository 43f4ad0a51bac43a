"""`kill -9` of every kind of process at random moments, under load: a minute of `make chaos`."""

from __future__ import annotations

import pytest

from tests.service.chaos import session
from tests.service.chaos.schedule import KINDS, plan
from tests.service.chaos.stand import Shape, Stand

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

SECONDS = 60
SMALL = 2 * 10**6  # nano-units: accounts run dry and are topped up on the way


@pytest.mark.parametrize(("database", "shards"), [("sqlite", 1), ("postgresql", 2)])
async def test_the_books_stay_exact_after_random_kills(database: str, shards: int) -> None:
    kinds = [kind for kind in KINDS if kind != "database" or database == "postgresql"]
    with Stand(Shape(database, shards, shards, gateways=2, stub=True, models=2)) as stand:
        report = await session.run(
            stand,
            session.kill_by(plan(7, SECONDS, kinds), SECONDS),
            mode="kills",
            seed=7,
            clients=12,
            credit=SMALL,
            top_up=SMALL,
        )
        stand.keep = bool(report.problems)
    assert report.problems == [], report.text()
    assert all(report.disturbances[kind] for kind in kinds)
    assert report.answers["200"] > 0
