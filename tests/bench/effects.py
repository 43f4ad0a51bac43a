"""What each speed-up does, as one figure: `python -m tests.bench.effects NAME` prints it for this process."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from serve_app.contracts.books import Outcome, Settled, Settlement
from serve_app.contracts.limiting import Release
from serve_app.contracts.metric import Metric
from serve_app.contracts.money import Price


class Lists:
    """Replaces a limiter and a shard of accounting: records the lists that arrive."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def ask(self, asks: list[Any]) -> Sequence[Any]:
        self.lengths.append(len(asks))
        return [None] * len(asks)

    async def settle(self, settlements: list[Settlement]) -> Sequence[Settled]:
        self.lengths.append(len(settlements))
        return [Settled(one.request_id, 0, 0, 1) for one in settlements]


class Counted:
    """Replaces Ray's metrics and the port: counts calls."""

    def __init__(self) -> None:
        self.calls = 0

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.calls += 1

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        self.calls += 1

    observe = set = add


async def sockets() -> int:
    """How many of five messages go through Serve."""
    from serve_app.contracts.transport import Line, Server

    by_serve = 0

    async def answer(message: Any) -> Any:
        return message

    async def send(message: Any) -> Any:
        nonlocal by_serve
        by_serve += 1
        return message

    server = Server(answer)
    line = Line(send, server.address)
    for number in range(5):
        assert await line.send(number) == number
        await asyncio.sleep(0.1)
    server.close()
    return by_serve


async def joined_asks() -> int:
    """The number of calls for five releases at once."""
    from serve_app.gateway.limiter_client import LimiterClient

    limiter: Any = Lists()
    client = LimiterClient([limiter], "holder", limiter, admit_timeout_s=1.0)
    for number in range(5):
        client.release(Release(f"r{number}", 0, 0, account_id="a"))
    await asyncio.sleep(0.1)
    assert sum(limiter.lengths) == 5
    return len(limiter.lengths)


async def joined_settlements() -> int:
    """The number of calls for five settlements at once."""
    from serve_app.contracts.accounting_shards import AccountingShards
    from serve_app.contracts.spool import Spool
    from serve_app.gateway.settlements import Settlements

    shard, anything = Lists(), Counted()
    with tempfile.TemporaryDirectory() as folder:
        settlements = Settlements(
            AccountingShards([shard]),  # type: ignore[list-item]
            Spool(folder, "bench"),
            anything,
            SimpleNamespace(release=lambda end: None),  # type: ignore[arg-type]
            settle_timeout_s=1.0,
        )
        usage = "m", "b", Price(0, 0, 0), 1, 0, 1, Outcome.COMPLETED, 0.0, 1.0
        await asyncio.gather(*(settlements.settle(Settlement(f"r{n}", "a", "k", *usage)) for n in range(5)))
    assert sum(shard.lengths) == 5
    return len(shard.lengths)


async def gathered_metrics() -> int:
    """The number of calls into Ray for five counts before a flush."""
    from deployments import metrics

    made = Counted()
    metrics._make = lambda metric: made
    counted = metrics.RayMetrics()
    for _ in range(5):
        counted.add(Metric("counter", "requests", "requests", ""), 1)
    return made.calls


async def plain_pickle() -> int:
    """Serialization options of a handle."""
    from deployments.handles import LimiterHandle

    class Handle:
        given: dict[str, Any] = {}  # noqa: RUF012

        def options(self, **options: Any) -> Handle:
            self.given |= options
            return self

    handle: Any = Handle()
    LimiterHandle(handle)
    return sum("serialization" in name for name in handle.given)


async def ready_events() -> int:
    """The number of events that have arrived and are read without a wait."""
    from serve_app.contracts.generation import Bill, Delta, GenerateCall, SamplingParams
    from serve_app.contracts.phases import Phases
    from serve_app.gateway.backends import Generation

    class Backends:
        async def generate(self, backend: str, call: GenerateCall) -> AsyncIterator[Delta]:
            yield Delta("x", 1)

    bill = Bill("a", "k", "m", "b", Price(0, 0, 0))
    call = GenerateCall("r", (), SamplingParams(max_tokens=1), 0, bill)
    generation = Generation(Backends(), "b", call, Phases())  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    if generation.ready_event() is not None:
        return 1
    assert await generation.next_event() == Delta("x", 1)
    return 0


EFFECTS = {
    "sockets": sockets,
    "joined-asks": joined_asks,
    "joined-settlements": joined_settlements,
    "gathered-metrics": gathered_metrics,
    "plain-pickle": plain_pickle,
    "ready-events": ready_events,
}


if __name__ == "__main__":
    print(asyncio.run(EFFECTS[sys.argv[1]]()))
