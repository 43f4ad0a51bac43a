"""A limiter that stands still: another one takes over when the lease is over, and it does no harm when it wakes."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.service.chaos import session
from tests.service.chaos.session import Session
from tests.service.chaos.stand import Shape, Stand

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

STOPS = int(os.environ.get("SERVE_APP_TEST_STOPS", "1"))
SMALL = 2 * 10**6  # nano-units: the balances are nearly spent all the time


async def test_a_stopped_limiter_is_succeeded_and_no_usage_is_uncollected() -> None:
    async def stop_and_continue(running: Session) -> None:
        for _ in range(STOPS):
            await running.more(40)
            [pid] = running.stand.pids("limiter")
            os.kill(pid, signal.SIGSTOP)
            try:
                await running.more(40)  # more than it has let in before
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        await running.more(40)

    with Stand(Shape("sqlite", stub=True, gateways=2)) as stand:
        report = await session.run(
            stand, stop_and_continue, mode="stop", seed=3, clients=12, credit=SMALL, top_up=SMALL
        )
        stand.keep = bool(report.problems)
    assert report.problems == [], report.text()
    assert report.figures["uncollected, nano-units"] == 0
