"""Each limiter shard receives the reports of a replica, and no failure of one reaches the replica."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.contracts.limiting import Heard, PressureReport
from serve_app.engine.port import EngineStats
from serve_app.model.pressure_reports import PressureReporter

STATS = EngineStats(
    running=3,
    waiting=2,
    kv_blocks_total=8,
    kv_blocks_used=2,
    oldest_wait_s=1.5,
    queued_prefill_tokens=40,
    steps=9,
    tokens_produced=100,
    preemptions=0,
    kv_blocks_cached=0,
    prefix_hit_tokens=0,
    prompt_tokens=50,
)
REPORT = PressureReport("local", "replica-1", 1.5, 0.25, 40, 2, 3, 150)


class Shards:
    """As many limiter shards as `count` says; those in `down` fail."""

    def __init__(self, count: int = 1, down: tuple[int, ...] = ()) -> None:
        self.count = count
        self.down = down
        self.refused: dict[int, float] = {}  # tokens per second, by shard
        self.looked_up: list[int] = []
        self.received: list[tuple[int, Any]] = []

    async def limiter(self, shard: int) -> Any:
        self.looked_up.append(shard)
        outer = self

        class Limiter:
            async def ask(self, asks: list[Any]) -> list[Any]:
                if shard in outer.down:
                    raise ConnectionError(f"shard {shard} is down")
                outer.received += [(shard, ask) for ask in asks]
                return [Heard(outer.count, outer.refused.get(shard, 0.0))]

        return Limiter()


def reporter(shards: Shards) -> PressureReporter:
    return PressureReporter("local", "replica-1", shards.limiter)


async def test_a_report_says_what_the_engine_has_to_do() -> None:
    shards = Shards()
    await reporter(shards).send_report(STATS)
    assert shards.received == [(0, REPORT)]


async def test_every_shard_is_looked_up_once_and_receives_each_report() -> None:
    shards = Shards(3)
    to_all = reporter(shards)
    await to_all.send_report(STATS)
    await to_all.send_report(STATS)
    assert [shard for shard, _ in shards.received] == [0, 1, 2, 0, 1, 2]
    assert shards.looked_up == [0, 1, 2]


async def test_a_shard_that_is_down_keeps_no_other_from_its_report(caplog: pytest.LogCaptureFixture) -> None:
    shards = Shards(3, down=(1,))
    await reporter(shards).send_report(STATS)
    assert [shard for shard, _ in shards.received] == [0, 2]
    assert not caplog.records


async def test_a_limiter_that_is_away_is_logged_once_and_receives_the_next_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shards = Shards(down=(0,))
    patient = reporter(shards)
    await patient.send_report(STATS)
    await patient.send_report(STATS)
    assert len(caplog.records) == 1
    shards.down = ()
    await patient.send_report(STATS)
    assert shards.received == [(0, REPORT)]


async def test_what_all_shards_refused_is_known_until_a_shard_does_not_answer() -> None:
    shards = Shards(2)
    shards.refused = {0: 100.0, 1: 50.0}
    hearing = reporter(shards)
    assert hearing.refused_tokens_per_s == 0.0
    await hearing.send_report(STATS)
    assert hearing.refused_tokens_per_s == 150.0
    shards.down = (1,)
    await hearing.send_report(STATS)
    assert hearing.refused_tokens_per_s == 100.0
    shards.down = (0, 1)
    await hearing.send_report(STATS)
    assert hearing.refused_tokens_per_s == 0.0
