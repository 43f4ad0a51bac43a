"""Ray handles behind the gateway's protocols. Errors of the transport become the protocols' own.

What a handle raises, read from Ray 2.60's sources: a fault of the replica's code is a RayTaskError over actor calls
and the bare exception over gRPC; a replica that has died is a RayError, over gRPC sometimes a bare AioRpcError; a
deployment that failed is a RayServeException; a call that the other side cancelled is a CancelledError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from ray.serve.schema import ApplicationStatus

from deployments.transport import Line
from serve_app.contracts.books import Settlement
from serve_app.contracts.calls import Unavailable, application_of, detached
from serve_app.contracts.commands import Answer, Command, FindUnsettled
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.generation import BackendEvent, GenerateCall, Rejected, Rejection
from serve_app.contracts.ports import BackendUnavailable, SettleAnswer

TRANSPORT = (RayError, RayServeException, grpc.RpcError)
# Serve's own choice, cloudpickle, takes up to four times as long and is for classes that the other side can't import.
PICKLED = {"request_serialization": "pickle", "response_serialization": "pickle"}
FINGERPRINT_S = 2.0  # a replica that is busy is not waited for: who lists models wants a list
STATUS_S = 1.0  # the least time between two questions to the controller
ENTRANCE = "Entrance"  # the ingress of a backend with a router of its own (deployments/routing.py)


class LimiterHandle:
    """LimiterPort over a line to a replica."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._line = _line(handle)

    async def ask(self, asks: list[Any]) -> Sequence[Any]:
        answers: list[Any] = await self._line.send(asks)
        return answers


class AccountingHandle:
    """AccountingPort over a line to a replica."""

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
    """What a model replica has of Accounting: a method of its own, which settles calls that were cut, and no more."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._answering = handle.options(method_name="answer_replica", **PICKLED)

    async def settle(self, settlements: list[Settlement]) -> Sequence[SettleAnswer]:
        """As AccountingPort.settle."""
        answers: Sequence[SettleAnswer] = await answer_of(self._answering.remote(settlements))
        return answers

    async def find_unsettled(self, request_ids: tuple[str, ...]) -> list[str]:
        """Those of these requests whose usage the ledger does not have. Raises LedgerError."""
        answer: list[str] | LedgerError = await answer_of(self._answering.remote(FindUnsettled(request_ids)))
        if isinstance(answer, LedgerError):
            raise answer
        return answer


def _line(handle: DeploymentHandle) -> Line:
    """A line to the deployment's only replica, which has the methods `answer` and `address`."""
    answering = handle.options(method_name="answer", **PICKLED)
    locating = handle.options(method_name="address", **PICKLED)

    async def by_serve(message: Any) -> Any:
        return await answer_of(answering.remote(message))

    async def find_address() -> str | None:
        address: str | None = await answer_of(locating.remote())
        return address

    return Line(by_serve, find_address)


async def answer_of(response: DeploymentResponse[Any]) -> Any:
    """The answer of a call. Raises Unavailable when it did not arrive; gives the call up when the caller does."""
    try:
        return await response
    except RayTaskError:
        raise  # a fault of the operation itself, not of its transport
    except TRANSPORT as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from None
    except asyncio.CancelledError:
        response.cancel()
        if _is_cancelled():
            raise
        raise Unavailable("the other side has cancelled the call") from None


def _is_cancelled() -> bool:
    """Whether it is this task that is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _model_of(application: str) -> DeploymentHandle:
    """The handle of a backend's model."""
    found = serve.get_app_handle(application)
    if found.deployment_name == ENTRANCE:
        return serve.get_deployment_handle("Model", app_name=application)
    return found


class BackendHandles:
    """BackendPort: each backend is an application of its own, found by name when it is first needed."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle] = {}
        self._status: dict[str, dict[str, Any]] = {}
        self._status_until = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._deployed: dict[str, float] = {}  # when each application was, in Unix seconds
        self._fingerprints: dict[str, tuple[float, str]] = {}  # of a backend, with the time it was deployed at

    async def _handle(self, application: str) -> DeploymentHandle:
        handle = self._handles.get(application)
        if handle is None:
            try:
                # Asks the controller and blocks: not on the loop. A controller that restarts would stop every stream.
                found = await asyncio.to_thread(_model_of, application)
            except TRANSPORT as error:
                raise BackendUnavailable(f"the application {application} is not there: {error}") from None
            handle = self._handles[application] = found.options(method_name="generate", stream=True, **PICKLED)
        return handle

    async def generate(self, backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """See BackendPort."""
        response = (await self._handle(application_of(backend))).remote(call)
        try:
            async for event in response:
                yield event
        except BackPressureError:
            yield Rejected(Rejection.QUEUE_FULL)
        except RayTaskError:
            raise  # the replica is alive and its code failed
        except TRANSPORT as error:
            raise BackendUnavailable(f"{type(error).__name__}: {error}") from None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise BackendUnavailable("the replica has cancelled the call") from None
        finally:
            _cancel(response)

    async def fingerprint(self, backend: str) -> str:
        """See BackendPort. Replicas are asked once for each time that their application is deployed."""
        backend = application_of(backend)
        status = (await self.status()).get(backend)
        if status is None or not status["replicas"]:
            raise BackendUnavailable(f"no replica of {backend} is ready")
        deployed = self._deployed[backend]
        known_at, known = self._fingerprints.get(backend, (0.0, ""))
        if known_at == deployed:
            return known
        ask = (await self._handle(backend)).options(method_name="fingerprint", stream=False)
        try:
            async with asyncio.timeout(FINGERPRINT_S):
                fingerprint: str = await answer_of(ask.remote())
        except Exception as error:  # an application of an older release, or none of ours, has no such method
            raise BackendUnavailable(f"{backend} does not report its fingerprint: {type(error).__name__}") from None
        if status["status"] == "RUNNING":  # and no update is on its way, so that no older replica has answered
            self._fingerprints[backend] = (deployed, fingerprint)
        return fingerprint

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
        self._status_until = time.monotonic() + STATUS_S

    def _replicas(self, name: str, application: dict[str, Any]) -> int:
        """Replicas that run.

        While Serve builds an application anew, and when that has failed, it names no deployment. Those that ran go on.
        """
        deployments = application["deployments"].values()
        if not deployments and application["status"] in (ApplicationStatus.DEPLOYING, ApplicationStatus.DEPLOY_FAILED):
            return int(self._status.get(name, {"replicas": 0})["replicas"])
        return sum(replica["state"] == "RUNNING" for deployment in deployments for replica in deployment["replicas"])


def _applications() -> dict[str, dict[str, Any]]:
    """Serve's applications as the controller describes them (`ApplicationDetails`).

    `serve.status` makes its models of the same answer anew, which pickles each router's class: 5% of a processor for
    a gateway that asks each second (ray 2.60).
    """
    applications: dict[str, dict[str, Any]] = _get_global_client().get_serve_details()["applications"]
    return applications


def _cancel(response: DeploymentResponseGenerator[Any]) -> None:
    """Cancels a call that nobody waits for any more.

    Serve forgets one that has gone to a replica and whose caller was cancelled before it noticed (ray 2.60): the
    replica would go on to the end of the reply.
    """
    response.cancel()
    sent = response._replica_result_future
    if sent.done() and not sent.cancelled() and sent.exception() is None:
        sent.result().cancel()
