"""A limiter that stood still: what came meanwhile is read before it decides that someone has gone."""

from __future__ import annotations

from typing import cast

from serve_app.contracts.limiting import Renew
from serve_app.contracts.ports import BooksPort
from serve_app.limiter.limiter_service import EXPIRE_S, LimiterService
from tests.limiter.world import World


def test_a_limiter_that_was_stalled_past_the_lease_reads_the_renewals_before_it_expires_holds() -> None:
    world = World()
    service = LimiterService(world.admission, cast(BooksPort, None), clock=lambda: world.now)
    world.grant("alive", holder="g1")
    world.grant("dead", holder="g2")
    for _ in range(5):
        world.wait(EXPIRE_S)
        service.tidy()
    world.wait(30)  # a pause of the process, a stop of the machine
    service.tidy()
    assert world.admission.status("a").open_requests == 2, "the renewals are queued behind this call"
    world.admission.renew(Renew("g1", ("alive",)))
    for _ in range(5):
        world.wait(EXPIRE_S)
        service.tidy()
    assert world.admission.renew(Renew("g1", ("alive",))) == ()
    assert world.admission.status("a").open_requests == 1
