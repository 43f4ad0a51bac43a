"""The errors that Ray's handles raise, as the gateway gets them: a process is unavailable, or its code has a fault."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentResponse

from deployments import gateway, handles, model, reply_lines
from deployments.handles import (
    ENTRANCE,
    AccountingHandle,
    BackendHandles,
    LimiterHandle,
    OtherGateways,
    ReplicaAccountingHandle,
)
from deployments.reply_lines import ReplyTo, send_events
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import CheckBooks, GetAccount
from serve_app.contracts.errors import AccountNotFound
from serve_app.contracts.generation import (
    BackendEvent,
    Bill,
    Delta,
    Finished,
    FinishReason,
    GenerateCall,
    Rejected,
    Rejection,
    SamplingParams,
    Started,
    TokenizeCall,
    Tokenized,
)
from serve_app.contracts.money import Price
from serve_app.contracts.ports import BackendUnavailable

AWAY = [
    ActorDiedError(),
    ActorUnavailableError("away", b"x" * 16),
    DeploymentUnavailableError(DeploymentID("Model", "m")),
    RequestCancelledError("r"),
    grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()),
    asyncio.CancelledError(),  # the other side cancelled the call
]
END = Finished(FinishReason.STOP, 1, 0, 1)
CALL = GenerateCall("r", (), SamplingParams(1), 1, Bill("a", "k", "m", "b", Price(1, 1, 1)))


def fault() -> RayTaskError:
    return RayTaskError("generate", "trace", ValueError("fault"), proctitle="x", pid=1, ip="127.0.0.1")


class AtReplica:
    """A fake ReplicaResult: the call as Serve has sent it to a replica."""

    def __init__(self) -> None:
        self.was_cancelled = False

    def cancel(self) -> None:
        self.was_cancelled = True


class Response:
    """A fake DeploymentResponse that does what the test sets: of a reply, it sends the events to the gateway."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps
        self.to: ReplyTo | None = None
        self.was_cancelled = False
        self.waits = asyncio.Event()  # set while a step is waited for
        self._replica_result_future: Future[AtReplica] = Future()

    def cancel(self) -> None:
        self.was_cancelled = True

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        if self.to is not None:
            return await send_events(self._steps(), self.to)
        return [step async for step in self._steps()][-1]

    async def _steps(self) -> AsyncGenerator[Any, None]:
        for step in self.steps:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, asyncio.Event):
                self.waits.set()
                await step.wait()
            yield step


class Handle:
    def __init__(self, *steps: Any, deployment_name: str = "Model") -> None:
        self.response = Response(*steps)
        self.deployment_name = deployment_name

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *arguments: Any) -> Response:
        if isinstance(arguments[-1] if arguments else None, ReplyTo):
            self.response.to = arguments[-1]
        return self.response


async def received(ports: BackendHandles) -> list[BackendEvent]:
    """The events of one reply."""
    events: list[BackendEvent] = []
    await ports.generate("b", CALL, events.append)
    return events


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
        await AccountingHandle(Handle(error)).run(CheckBooks())
    handle, events = Handle(Started(1, 0), error), list[BackendEvent]()
    with pytest.raises(BackendUnavailable):
        await backends(monkeypatch, handle).generate("b", CALL, events.append)
    assert handle.response.was_cancelled


async def test_a_fault_of_the_other_side_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RayTaskError):
        await AccountingHandle(Handle(fault())).run(CheckBooks())
    for error in (fault(), RuntimeError("over gRPC the bare exception comes")):
        with pytest.raises(type(error)):
            await received(backends(monkeypatch, Handle(error)))


async def test_what_a_replica_said_before_its_fault_arrives_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (fault(), RuntimeError("over gRPC the bare exception comes")):
        events: list[BackendEvent] = []
        ports = backends(monkeypatch, Handle(Started(1, 0), Delta("a", 1), error))
        with pytest.raises(type(error)):
            await ports.generate("b", CALL, events.append)
        assert events == [Started(1, 0), Delta("a", 1)]


async def test_a_reply_ends_with_its_last_event_and_its_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(Started(1, 0), Delta("a", 1), END)
    assert await received(backends(monkeypatch, handle)) == [Started(1, 0), Delta("a", 1), END]
    assert not handle.response.was_cancelled


async def test_events_that_come_after_the_answer_of_a_replica_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.handles.REASON_S", 0.0)
    taken, gate = reply_lines.OpenReply.arrived, asyncio.Event()
    said: list[Any] = []

    def later(reply: reply_lines.OpenReply, events: list[BackendEvent | None]) -> None:
        said.append((reply, events))
        gate.set()

    monkeypatch.setattr(reply_lines.OpenReply, "arrived", later)
    handle = Handle(Started(1, 0), END)
    reading = asyncio.ensure_future(received(backends(monkeypatch, handle)))
    await asyncio.wait_for(gate.wait(), 30)
    for _ in range(20):  # the answer arrives
        await asyncio.sleep(0)
    assert not reading.done()
    while not reading.done():
        for reply, events in said:
            taken(reply, events)
        said.clear()
        await asyncio.sleep(0)
    assert await reading == [Started(1, 0), END]


async def test_a_gateway_that_cannot_listen_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = backends(monkeypatch, Handle(Started(1, 0), END))
    ports.close()
    with pytest.raises(BackendUnavailable, match="no longer listens"):
        await received(ports)


async def test_a_stream_without_an_end_is_a_lost_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match="ended early"):
        await received(backends(monkeypatch, Handle(Started(1, 0))))


async def test_a_replica_of_an_earlier_release_cannot_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = RayTaskError("m", "t", RayServeException("no such method"), proctitle="x", pid=1, ip="127.0.0.1")
    with pytest.raises(BackendUnavailable):
        await received(backends(monkeypatch, Handle(missing.as_instanceof_cause())))


async def test_a_ledger_error_arrives_unchanged() -> None:
    import pickle

    crossed = pickle.loads(pickle.dumps(AccountNotFound("acct_1")))
    with pytest.raises(AccountNotFound, match=r"^no account 'acct_1': list") as caught:
        await AccountingHandle(Handle(crossed)).run(GetAccount("acct"))
    assert caught.value.args == ("acct_1",)


async def test_a_replica_settles_by_a_method_of_its_own_and_runs_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    class Recorded(Handle):
        def options(self, **options: Any) -> Handle:
            called.append(options["method_name"])
            return self

    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_, **__: Recorded(["settled"]))
    assert await model.settle([]) == ["settled"]
    assert called == ["answer_replica"]
    assert not hasattr(ReplicaAccountingHandle(Recorded()), "run")
    with pytest.raises(Unavailable):
        await ReplicaAccountingHandle(Handle(ActorDiedError())).settle([])


async def test_a_gateway_that_leaves_asks_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    steps: list[Any] = [True]

    class Recorded(Handle):
        def options(self, **options: Any) -> Handle:
            asked.append((options["method_name"],))
            return self

    def find(*names: str, **application: str) -> Handle:
        asked.append((*names, *application.values()))
        return Recorded(*steps)

    monkeypatch.setattr(serve, "get_deployment_handle", find)
    others = OtherGateways()
    assert await others.take_over([])
    assert await others.take_over([])
    assert asked == [("Gateway", "gateway"), ("take_over",)]
    assert hasattr(gateway.Gateway.func_or_class, "take_over")
    steps[:] = [ActorDiedError()]
    with pytest.raises(Unavailable):
        await OtherGateways().take_over([])


async def test_cancelling_the_caller_cancels_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(asyncio.Event())
    for coroutine in (LimiterHandle(handle).ask([]), received(backends(monkeypatch, handle))):
        handle.response.was_cancelled = False
        handle.response.waits.clear()
        task = asyncio.ensure_future(coroutine)
        await handle.response.waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert handle.response.was_cancelled


async def test_a_hang_up_leaves_neither_a_cycle_nor_an_unseen_error(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))

    class Cancelled(Response):
        async def _answer(self) -> Any:
            try:
                await super()._answer()
            except asyncio.CancelledError as error:
                self.seen = error  # as Serve's objects do: error, traceback, frame and response are a cycle
                raise RequestCancelledError("r") from None

    handle = Handle()
    handle.response = Cancelled(asyncio.Event())
    task = asyncio.ensure_future(received(backends(monkeypatch, handle)))
    await handle.response.waits.wait()
    gc.collect()
    gc.disable()
    try:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(3):
            await asyncio.sleep(0)
        response, handle.response, task = weakref.ref(handle.response), Response(), None
        assert response() is None
    finally:
        gc.enable()
    gc.collect()
    assert not unseen


async def test_a_call_that_has_just_gone_to_a_replica_is_cancelled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(asyncio.Event())
    task = asyncio.ensure_future(received(backends(monkeypatch, handle)))
    await handle.response.waits.wait()
    sent = AtReplica()
    handle.response._replica_result_future.set_result(sent)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert sent.was_cancelled


def test_serves_responses_know_their_call_at_the_replica() -> None:
    sent: Future[Any] = Future()
    response: Any = DeploymentResponse(sent, RequestMetadata("r", "r"))
    assert response._replica_result_future is sent


async def test_backpressure_is_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = await received(backends(monkeypatch, Handle(BackPressureError(3, 2))))
    assert refused == [Rejected(Rejection.QUEUE_FULL)]


async def test_a_replica_tokenizes_by_a_method_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[dict[str, Any]] = []

    class Recorded(Handle):
        def options(self, **options: Any) -> Handle:
            chosen.append(options)
            return self

    ports = backends(monkeypatch, Recorded(Tokenized(3)))
    assert await ports.tokenize("b", TokenizeCall("a", text="abc")) == Tokenized(3)
    await received(backends(monkeypatch, Recorded(Rejected(Rejection.CLOSED))))
    assert [one["method_name"] for one in chosen] == ["reply", "tokenize", "reply"]
    assert all(hasattr(model.Model.func_or_class, name) for name in ("reply", "tokenize"))


@pytest.mark.parametrize("error", [*AWAY, BackPressureError(3, 2)], ids=lambda error: type(error).__name__)
async def test_a_replica_that_is_away_does_not_tokenize(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable):
        await backends(monkeypatch, Handle(error)).tokenize("b", TokenizeCall("a", text="abc"))


async def test_a_replica_of_an_earlier_release_cannot_tokenize(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = RayTaskError("m", "t", RayServeException("no such method"), proctitle="x", pid=1, ip="127.0.0.1")
    with pytest.raises(BackendUnavailable):
        await backends(monkeypatch, Handle(missing.as_instanceof_cause())).tokenize("b", TokenizeCall("a", text="a"))
    with pytest.raises(RayTaskError):
        await backends(monkeypatch, Handle(fault())).tokenize("b", TokenizeCall("a", text="a"))


async def test_an_application_is_unavailable_until_it_is_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise RayServeException("Application 'b' does not exist.")

    monkeypatch.setattr(serve, "get_app_handle", missing)
    ports = BackendHandles()
    with pytest.raises(BackendUnavailable, match="was not found"):
        await received(ports)
    monkeypatch.setattr(serve, "get_app_handle", lambda _: Handle(END))
    assert await received(ports) == [END]


async def test_a_backend_is_its_model_also_behind_an_entrance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "get_app_handle", lambda _: Handle(deployment_name=ENTRANCE))
    models = {("Model", "b"): Handle(END)}
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, app_name: models[name, app_name])
    assert await received(BackendHandles()) == [END]


async def test_many_concurrent_callers_send_one_call_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def applications() -> dict[str, Any]:
        asked.append(1)
        return {}

    monkeypatch.setattr(handles, "_applications", applications)
    ports = BackendHandles()
    await asyncio.gather(*(ports.status() for _ in range(50)))
    await ports.status()
    assert len(asked) == 1


async def test_a_controller_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def applications() -> Any:
        raise ActorDiedError

    monkeypatch.setattr(handles, "_applications", applications)
    with pytest.raises(BackendUnavailable):
        await BackendHandles().status()


async def test_an_adapter_has_a_fingerprint_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    class Asked(Handle):
        def remote(self, *arguments: Any) -> Response:
            asked.append(arguments)
            return Response(f"fingerprint {len(asked)}")

    running = {"status": "RUNNING", "deployments": {"Model": {"message": "", "replicas": [{"state": "RUNNING"}]}}}
    running |= {"message": "", "last_deployed_time_s": 1.0}
    monkeypatch.setattr(handles, "_applications", lambda: {"qwen": running})
    ports = backends(monkeypatch, Asked())
    for _ in range(2):
        assert await ports.fingerprint("qwen") == "fingerprint 1"
        assert await ports.fingerprint("qwen:law") == "fingerprint 2"
    assert asked == [(), ("law",)]
