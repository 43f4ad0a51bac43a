"""The id that a response carries is the one that the log has, also where Serve sets the header."""

from __future__ import annotations

import httpx
import pytest
from ray.serve._private import http_util
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from deployments.request_ids import KeptRequestIds, keep_request_ids
from serve_app.gateway.web import RequestContext

KEPT = [b"mine", b"!", b"two words", b"x" * 128]
REPLACED = [b"", b" ", b"x" * 129, b"x" * 100_000, "\u00e9".encode(), b"\xff", b"a\tb", b"\x7f"]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(Request(scope).state.request_id)(scope, receive, send)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    monkeypatch.setattr(http_util, "RequestIdMiddleware", http_util.RequestIdMiddleware)  # restored after the test
    keep_request_ids()
    whole = http_util._apply_middlewares(RequestContext(app, tag_responses=False), [])
    assert isinstance(whole, KeptRequestIds)
    return httpx.AsyncClient(transport=httpx.ASGITransport(whole), base_url="http://test")


@pytest.mark.parametrize("sent", [*KEPT, *REPLACED], ids=lambda sent: repr(sent[:10]))
async def test_the_id_in_the_response_is_the_id_in_the_log(served: httpx.AsyncClient, sent: bytes) -> None:
    answer = await served.get("/", headers=[(b"x-request-id", sent), (b"x-request-id", b"second")])
    [echoed] = answer.headers.get_list("x-request-id")
    assert echoed == answer.text
    assert (echoed == sent.decode("latin-1")) == (sent in KEPT)


async def test_a_request_without_an_id_gets_one(served: httpx.AsyncClient) -> None:
    answer = await served.get("/")
    assert answer.headers.get_list("x-request-id") == [answer.text]
    assert answer.text.startswith("req_")
