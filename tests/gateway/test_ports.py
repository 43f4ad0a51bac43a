"""What Ray's handles raise, as the gateway sees it: a part that is away, or a fault in its code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, RequestCancelledError

from deployments.ports import AccountingHandle, BackendHandles, LimiterHandle
from serve_app.backend import Bill, GenerateCall, Rejected, Rejection
from serve_app.engine.request import SamplingParams, Started
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.ports import BackendUnavailable
from serve_app.ledger import AccountNotFound
from serve_app.ledger.messages import Price

AWAY = [
    ActorDiedError(),
    ActorUnavailableError("away", b"x" * 16),
    DeploymentUnavailableError(DeploymentID("Model", "m")),
    RequestCancelledError("r"),
    grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()),
    asyncio.CancelledError(),  # the other side cancelled the call, not we
]
CALL = GenerateCall("r", (), SamplingParams(1), 1, Bill("a", "k", "m", "b", Price(1, 1, 1)))


def fault() -> RayTaskError:
    return RayTaskError("generate", "trace", ValueError("fault"), proctitle="x", pid=1, ip="127.0.0.1")


class Response:
    """A DeploymentResponse, or its generator, that does as it is told."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps
        self.was_cancelled = False

    def cancel(self) -> None:
        self.was_cancelled = True

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        return [step async for step in self][-1]

    async def __aiter__(self) -> AsyncIterator[Any]:
        for step in self.steps:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
            yield step


class Handle:
    def __init__(self, *steps: Any) -> None:
        self.response = Response(*steps)

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *_: Any) -> Response:
        return self.response


def backends(monkeypatch: pytest.MonkeyPatch, handle: Handle) -> BackendHandles:
    monkeypatch.setattr(serve, "get_app_handle", lambda _: handle)
    return BackendHandles()


@pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
async def test_a_part_that_is_away_is_unavailable(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable):
        await LimiterHandle(Handle(error)).ask([])
    with pytest.raises(Unavailable):
        await AccountingHandle(Handle(error)).settle([])
    with pytest.raises(Unavailable):
        await AccountingHandle(Handle(error)).call("check", {})
    handle = Handle(Started(1, 0), error)
    stream = backends(monkeypatch, handle).generate("b", CALL)
    assert await anext(stream) == Started(1, 0)
    with pytest.raises(BackendUnavailable):
        await anext(stream)
    assert handle.response.was_cancelled


async def test_a_fault_of_the_other_side_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RayTaskError):
        await AccountingHandle(Handle(fault())).call("check", {})
    for error in (fault(), RuntimeError("over gRPC the bare exception comes")):
        with pytest.raises(type(error)):
            await anext(backends(monkeypatch, Handle(error)).generate("b", CALL))


async def test_a_ledger_error_arrives_as_it_left() -> None:
    import pickle

    crossed = pickle.loads(pickle.dumps(AccountNotFound("acct_1")))
    with pytest.raises(AccountNotFound, match=r"^no account 'acct_1': list") as caught:
        await AccountingHandle(Handle(crossed)).call("get_account", {})
    assert caught.value.account_id == "acct_1"


async def test_our_own_cancellation_stays_one_and_gives_the_call_up(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(asyncio.Event())
    for coroutine in (LimiterHandle(handle).ask([]), anext(backends(monkeypatch, handle).generate("b", CALL))):
        handle.response.was_cancelled = False
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert handle.response.was_cancelled


async def test_backpressure_is_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = backends(monkeypatch, Handle(BackPressureError(3, 2))).generate("b", CALL)
    assert [event async for event in stream] == [Rejected(Rejection.QUEUE_FULL)]


async def test_an_application_that_is_not_there_is_unavailable_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise RayServeException("Application 'b' does not exist.")

    monkeypatch.setattr(serve, "get_app_handle", missing)
    ports = BackendHandles()
    with pytest.raises(BackendUnavailable, match="not there"):
        await anext(ports.generate("b", CALL))
    monkeypatch.setattr(serve, "get_app_handle", lambda _: Handle(Started(1, 0)))
    assert await anext(ports.generate("b", CALL)) == Started(1, 0)


async def test_the_controller_is_asked_once_for_many_who_want_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Report:
        applications: dict[str, Any] = {}  # noqa: RUF012

    def status() -> Report:
        asked.append(1)
        return Report()

    monkeypatch.setattr(serve, "status", status)
    ports = BackendHandles()
    await asyncio.gather(*(ports.status() for _ in range(50)))
    await ports.status()
    assert len(asked) == 1


async def test_a_controller_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def status() -> Any:
        raise ActorDiedError

    monkeypatch.setattr(serve, "status", status)
    with pytest.raises(BackendUnavailable):
        await BackendHandles().status()
