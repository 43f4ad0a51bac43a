"""The whole service under malformed bodies and requests: each is answered, and the next one is served."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.malformed import SAMPLE, TABLE
from tests.malformed.asked import Server, drips, wrong_cases, wrong_rows
from tests.malformed.transport import cases
from tests.service.harness import Service

pytestmark = pytest.mark.service

BLOCK = 40  # fewer than HAProxy lets a key be refused in 10 s
BODY_TIMEOUT_S = 30.0  # as configured


def server_of(service: Service) -> Server:
    """Returns the service as a new account reaches it."""
    port = httpx.URL(service.base_url).port
    assert port is not None
    return Server(port, service.account("malformed").key, BODY_TIMEOUT_S, is_balanced=True)


@pytest.fixture
def server(service: Service) -> Server:
    return server_of(service)


@pytest.mark.slow
@pytest.mark.long
def test_each_malformed_body_is_refused_and_the_next_request_is_served(service: Service) -> None:
    def problems(start: int) -> list[str]:
        server = server_of(service)
        return wrong_rows(server, TABLE[start : start + BLOCK]) + ([] if server.serves() else ["nothing is served"])

    # Each waits in HAProxy's lane of this address, so they go at the same time.
    with ThreadPoolExecutor(16) as threads:
        assert list(itertools.chain.from_iterable(threads.map(problems, range(0, len(TABLE), BLOCK)))) == []


@pytest.mark.slow
@pytest.mark.long
def test_each_malformed_request_is_answered_or_closed_and_the_next_one_is_served(server: Server) -> None:
    assert wrong_cases(server, cases(server.key)) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_body_that_comes_byte_for_byte_is_408_however_steadily_it_comes(server: Server) -> None:
    answer = drips(server, lambda: time.sleep(BODY_TIMEOUT_S / 10))
    assert answer.status == 408
    assert answer.error is not None
    assert answer.error["code"] == "body_timeout"
    assert server.serves()


def test_refusals_cost_nothing(service: Service) -> None:
    account = service.account("refused")
    port = httpx.URL(service.base_url).port
    assert port is not None
    server = Server(port, account.key, BODY_TIMEOUT_S, is_balanced=True)
    assert wrong_rows(server, [row for row in SAMPLE if row.status != 200]) == []
    view = account.settled(0)
    assert view["usage"]["requests"] == 0
    assert account.nano == 5 * 10**9
