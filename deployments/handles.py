"""Ray handles behind the gateway's protocols. Transport errors become the protocols' errors.

According to Ray 2.60's source code, a handle raises:

- after an error in the replica's code: RayTaskError over actor calls, the original exception over gRPC;
- for a dead replica: RayError; over gRPC, sometimes AioRpcError;
- for a failed deployment: RayServeException;
- for a call that the other side cancelled: CancelledError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.schema import ApplicationStatus

from deployments.direct_calls import Line
from deployments.reply_lines import OpenReply, ReplyListener
from deployments.transport import Address
from serve_app.contracts.books import Settlement
from serve_app.contracts.calls import Unavailable, adapter_of, application_of, detached
from serve_app.contracts.commands import Answer, Command, FindUnsettled
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.generation import (
    BackendEvent,
    GenerateCall,
    Rejected,
    Rejection,
    TokenizeCall,
    Tokenized,
)
from serve_app.contracts.offers import Front
from serve_app.contracts.ports import BackendUnavailable, SettleAnswer

TRANSPORT = (RayError, RayServeException, grpc.RpcError)
# Serve's default, cloudpickle, takes up to four times as long. It is needed only for classes that cannot be imported.
PICKLED = {"request_serialization": "pickle", "response_serialization": "pickle"}
FINGERPRINT_S = 2.0  # timeout: a list of models does not wait for a busy replica
LANDING_S = 3.0  # timeout for the console's page
EVENTS_S = 30.0  # timeout for events that the replica has sent and that this process has not read yet
REASON_S = 2.0  # at the end of a call, time to wait for the last events, or for the reason why there are no more
STATUS_S = 1.0  # minimum time between two queries to the controller
ENTRANCE = "Entrance"  # the ingress of a backend with a custom router (deployments/routing.py)


class LimiterHandle:
    """Implements LimiterPort over a line to a replica."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._line = _line(handle)

    async def ask(self, asks: list[Any]) -> Sequence[Any]:
        answers: list[Any] = await self._line.send(asks)
        return answers


class AccountingHandle:
    """Implements AccountingPort over a line to a replica."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._line = _line(handle)

    async def settle(self, settlements: list[Settlement]) -> Sequence[SettleAnswer]:
        answers: list[SettleAnswer] = await self._line.send(settlements)
        return answers

    async def run(self, command: Command[Answer]) -> Answer:
        answer: Answer = await self._line.send(command)
        if isinstance(answer, LedgerError):
            raise answer
        return answer


class ReplicaAccountingHandle:
    """A model replica's access to Accounting, through a separate method.

    It can only settle interrupted calls, and find calls that are not settled.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._answering = handle.options(method_name="answer_replica", **PICKLED)

    async def settle(self, settlements: list[Settlement]) -> Sequence[SettleAnswer]:
        """See AccountingPort.settle."""
        answers: Sequence[SettleAnswer] = await answer_of(self._answering.remote(settlements))
        return answers

    async def find_unsettled(self, request_ids: tuple[str, ...]) -> list[str]:
        """Returns the requests whose usage the ledger does not have. Raises LedgerError."""
        answer: list[str] | LedgerError = await answer_of(self._answering.remote(FindUnsettled(request_ids)))
        if isinstance(answer, LedgerError):
            raise answer
        return answer


class OtherGateways:
    """The other gateways, for a gateway that is stopping. Serve calls only gateways that are not stopping."""

    def __init__(self) -> None:
        self._taking: DeploymentHandle | None = None

    async def take_over(self, settlements: list[Settlement]) -> bool:
        """Returns whether one of the gateways has made all of these settlements durable. Raises Unavailable."""
        if self._taking is None:
            # In a thread: the call blocks on Serve's controller.
            found = await asyncio.to_thread(serve.get_deployment_handle, "Gateway", app_name="gateway")
            self._taking = found.options(method_name="take_over", **PICKLED)
        return bool(await answer_of(self._taking.remote(settlements)))


class ConsoleHandle:
    """The console, which is not always running."""

    def __init__(self) -> None:
        self._landing: DeploymentHandle | None = None

    async def landing(self, front: Front) -> tuple[bytes, dict[str, str]] | None:
        """Returns the page at `/` and its headers; None if the console does not answer soon."""
        try:
            if self._landing is None:
                found = await asyncio.to_thread(serve.get_deployment_handle, "Console", app_name="console")
                self._landing = found.options(method_name="landing", **PICKLED)
            async with asyncio.timeout(LANDING_S):
                made: tuple[bytes, dict[str, str]] = await answer_of(self._landing.remote(front))
        except RayTaskError:
            raise  # an error in rendering the page
        except (Unavailable, TimeoutError, *TRANSPORT):
            return None
        return made


def _line(handle: DeploymentHandle) -> Line:
    """Returns a line to the deployment's only replica, which has the methods `answer` and `address`."""
    answering = handle.options(method_name="answer", **PICKLED)
    locating = handle.options(method_name="address", **PICKLED)

    async def by_serve(call: Any) -> Any:
        return await answer_of(answering.remote(call))

    async def find_address() -> Address | None:
        address: Address | None = await answer_of(locating.remote())
        return address

    return Line(by_serve, find_address)


async def answer_of(response: DeploymentResponse[Any]) -> Any:
    """Returns a call's answer. Raises Unavailable if none arrives. Cancels the call if the caller is cancelled."""
    try:
        return await response
    except RayTaskError:
        raise  # an error in the operation itself, not in its transport
    except TRANSPORT as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from None
    except asyncio.CancelledError:
        response.cancel()
        if _is_cancelled():
            raise
        raise Unavailable("the other side has cancelled the call") from None


def _is_cancelled() -> bool:
    """Returns whether the current task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _model_of(application: str) -> DeploymentHandle:
    """Returns the handle of a backend's model."""
    found = serve.get_app_handle(application)
    if found.deployment_name == ENTRANCE:
        return serve.get_deployment_handle("Model", app_name=application)
    return found


class BackendHandles:
    """Implements BackendPort. Each backend is a separate application, found by name on first use.

    `host` is the address at which replicas on other machines reach this process.
    """

    def __init__(self, host: str = "") -> None:
        self._replies = ReplyListener(host)
        self._handles: dict[str, DeploymentHandle] = {}
        self._status: dict[str, dict[str, Any]] = {}
        self._status_until = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._routes: dict[str, str] = {}  # path of each running application that has one
        self._deployed: dict[str, float] = {}  # deployment time by application, in Unix seconds
        self._fingerprints: dict[str, tuple[float, str]] = {}  # deployment time and fingerprint by backend

    def close(self) -> None:
        """Closes the connections from replicas."""
        self._replies.close()

    async def _handle(self, application: str) -> DeploymentHandle:
        handle = self._handles.get(application)
        if handle is None:
            try:
                # In a thread: a restarting controller would otherwise block the event loop and every stream.
                found = await asyncio.to_thread(_model_of, application)
            except TRANSPORT as error:
                raise BackendUnavailable(f"the application {application} was not found: {error}") from None
            handle = self._handles[application] = found.options(method_name="reply", **PICKLED)
        return handle

    async def generate(self, backend: str, call: GenerateCall, take: Callable[[BackendEvent], None]) -> None:
        """See BackendPort."""
        handle = await self._handle(application_of(backend))
        try:
            reply, to = await self._replies.open(take)
        except OSError as error:
            raise BackendUnavailable(f"this gateway can't listen for replies: {error}") from None
        response = answer = None
        try:
            response = handle.remote(call, to)
            answer = asyncio.ensure_future(_answer(response))
            answer.add_done_callback(_retrieve_error)
            futures: list[asyncio.Future[Any]] = [reply.over, answer]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not reply.is_complete and await self._ended_early(reply, answer):
                take(Rejected(Rejection.QUEUE_FULL))
        finally:
            self._replies.close_reply(reply)
            if not reply.is_complete and answer is not None and response is not None:
                answer.cancel()
                _cancel(response)

    async def _ended_early(self, reply: OpenReply, answer: asyncio.Future[str | None]) -> bool:
        """Finds out why a call ended before its last event arrived.

        Returns True if all replicas were full, and False if the last event arrives after all. For any other reason,
        raises the call's error. Errors arrive through Serve, events through another connection.
        """
        if not answer.done():  # the connection is lost, or the replica has failed: Serve reports the reason
            await asyncio.wait([answer], timeout=REASON_S)
        if not answer.done():
            raise BackendUnavailable("the connection to the replica is lost")
        try:
            error = answer.exception()
        except asyncio.CancelledError:
            error = BackendUnavailable("the replica has cancelled the call")
        if isinstance(error, BackPressureError):
            return True
        is_lost = isinstance(error, (*TRANSPORT, BackendUnavailable)) and not isinstance(error, RayTaskError)
        if error is None and answer.result() is None:
            await asyncio.wait([reply.over], timeout=EVENTS_S)
        elif reply.has_begun or not is_lost:
            await asyncio.wait([reply.over], timeout=REASON_S)
        if reply.is_complete:
            return False
        if error is None:
            raise BackendUnavailable(answer.result() or "the stream ended early")
        if is_lost or isinstance(error, RayServeException):  # or a replica of an earlier release has no such method
            raise BackendUnavailable(f"{type(error).__name__}: {error}")
        raise error

    async def tokenize(self, backend: str, call: TokenizeCall) -> Tokenized | Rejected:
        """See BackendPort."""
        ask = (await self._handle(application_of(backend))).options(method_name="tokenize")
        try:
            answer: Tokenized | Rejected = await answer_of(ask.remote(call))
        except RayTaskError as error:
            if isinstance(error, RayServeException):  # a replica of an older release has no such method
                raise BackendUnavailable(f"{backend} can't tokenize: {error}") from None
            raise
        except Unavailable as error:
            raise BackendUnavailable(str(error)) from None
        return answer

    async def fingerprint(self, backend: str) -> str:
        """See BackendPort. Keeps the answer of the replicas until their application is deployed again."""
        application, adapter = application_of(backend), adapter_of(backend)
        status = (await self.status()).get(application)
        if status is None or not status["replicas"]:
            raise BackendUnavailable(f"no replica of {application} is ready")
        deployed = self._deployed[application]
        known_at, known = self._fingerprints.get(backend, (0.0, ""))
        if known_at == deployed:
            return known
        ask = (await self._handle(application)).options(method_name="fingerprint")
        try:
            async with asyncio.timeout(FINGERPRINT_S):
                fingerprint: str = await answer_of(ask.remote(*([adapter] if adapter else [])))
        except Exception as error:  # an older release, or a foreign application, has no such method
            raise BackendUnavailable(f"{backend} does not report its fingerprint: {type(error).__name__}") from None
        if status["status"] == "RUNNING":  # no update is in progress, so no older replica has answered
            self._fingerprints[backend] = (deployed, fingerprint)
        return fingerprint

    def route_of(self, application: str) -> str | None:
        """Returns an application's path as of the last status; None if it has no path or does not run."""
        return self._routes.get(application)

    async def status(self) -> dict[str, dict[str, Any]]:
        """See BackendPort."""
        if time.monotonic() >= self._status_until:
            if self._asking is None or self._asking.done():
                self._asking = detached(self._ask_status())
            await asyncio.shield(self._asking)
        if time.monotonic() >= self._status_until:
            raise BackendUnavailable("Serve's controller did not answer")
        return self._status

    async def _ask_status(self) -> None:
        try:
            applications = await asyncio.to_thread(_applications)
        except TRANSPORT:
            return
        self._status = {
            name: {
                "status": ApplicationStatus(one["status"]).value,
                "replicas": self._replicas(name, one),
                "message": one["message"] or " ".join(part["message"] for part in one["deployments"].values()),
            }
            for name, one in applications.items()
        }
        self._deployed = {name: one["last_deployed_time_s"] for name, one in applications.items()}
        routes = {name: one.get("route_prefix") for name, one in applications.items() if self._status[name]["replicas"]}
        self._routes = {name: path for name, path in routes.items() if path is not None}
        self._status_until = time.monotonic() + STATUS_S

    def _replicas(self, name: str, application: dict[str, Any]) -> int:
        """Returns the number of running replicas.

        Serve lists no deployments while it rebuilds an application, and after a failed rebuild. The earlier replicas
        keep running, so the previous number still applies.
        """
        deployments = application["deployments"].values()
        if not deployments and application["status"] in (ApplicationStatus.DEPLOYING, ApplicationStatus.DEPLOY_FAILED):
            return int(self._status.get(name, {"replicas": 0})["replicas"])
        return sum(replica["state"] == "RUNNING" for deployment in deployments for replica in deployment["replicas"])


def _applications() -> dict[str, dict[str, Any]]:
    """Returns Serve's applications as the controller describes them (`ApplicationDetails`).

    `serve.status` would also build Ray's status objects from this answer, and pickle each router's class. For a gateway
    that polls once a second, this would take 5% of a core (ray 2.60).
    """
    applications: dict[str, dict[str, Any]] = _get_global_client().get_serve_details()["applications"]
    return applications


async def _answer(response: DeploymentResponse[Any]) -> str | None:
    answer: str | None = await response
    return answer


def _retrieve_error(answer: asyncio.Future[str | None]) -> None:
    """Marks a call's error as seen, and frees what a cancelled call refers to.

    After a hang-up, nothing waits for the call any more, and Serve ends it with RequestCancelledError. Python logs an
    unseen error with its traceback while the garbage collector runs. The CancelledError behind it keeps, through its
    own traceback, all objects of the call in a reference cycle.
    """
    error = None if answer.cancelled() else answer.exception()
    if isinstance(error, RequestCancelledError) and error.__context__ is not None:
        error.__context__.__traceback__ = None


def _cancel(response: DeploymentResponse[Any]) -> None:
    """Cancels a call whose caller no longer waits for it.

    If the caller is cancelled just after a call has reached a replica, Serve (ray 2.60) may not cancel it there. The
    replica would then continue to the end of the reply.
    """
    response.cancel()
    sent = response._replica_result_future
    if sent.done() and not sent.cancelled() and sent.exception() is None:
        sent.result().cancel()
