"""Ray handles behind the gateway's protocols. Errors of the transport become the protocols' own.

What a handle raises, read from Ray 2.60's sources: a fault of the replica's code is a RayTaskError over actor calls
and the bare exception over gRPC; a replica that has died is a RayError, over gRPC sometimes a bare AioRpcError; a
deployment that failed is a RayServeException; a call that the other side cancelled is a CancelledError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from serve_app.backend.messages import BackendEvent, GenerateCall, Rejected, Rejection
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.line import Line
from serve_app.gateway.ports import BackendUnavailable, SettleAnswer
from serve_app.gateway.tasks import detached
from serve_app.ledger import LedgerError
from serve_app.ledger.messages import Settlement

TRANSPORT = (RayError, RayServeException, grpc.RpcError)
# Serve's own choice, cloudpickle, takes up to four times as long and is for classes that the other side can't import.
PICKLED = {"request_serialization": "pickle", "response_serialization": "pickle"}
FINGERPRINT_S = 2.0  # a replica that is busy is not waited for: who lists models wants a list
STATUS_S = 1.0  # the controller is asked for the status at most so often, whoever asks for it


class LimiterHandle:
    """LimiterPort over a line to a replica."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._line = Line(_through_serve(handle, "ask"))

    async def ask(self, asks: list[Any]) -> Sequence[Any]:
        """See LimiterPort."""
        answers: list[Any] = await self._line.call("ask", asks)
        return answers


class AccountingHandle:
    """AccountingPort over a line to a replica."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._line = Line(_through_serve(handle, "settle", "call"))

    async def settle(self, settlements: list[Settlement]) -> Sequence[SettleAnswer]:
        """See AccountingPort."""
        answers: list[SettleAnswer] = await self._line.call("settle", settlements)
        return answers

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """See AccountingPort."""
        answer = await self._line.call("call", operation, arguments)
        if isinstance(answer, LedgerError):
            raise answer
        return answer


def _through_serve(handle: DeploymentHandle, *methods: str) -> Callable[..., Awaitable[Any]]:
    """Calls of these methods, and of `address`, through Serve; see Line."""
    handles = {method: handle.options(method_name=method, **PICKLED) for method in (*methods, "address")}

    async def call(method: str, *arguments: Any) -> Any:
        return await _answer(handles[method].remote(*arguments))

    return call


async def _answer(response: DeploymentResponse[Any]) -> Any:
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


class BackendHandles:
    """BackendPort: each backend is an application of its own, found by name when it is first needed."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle] = {}
        self._status: dict[str, dict[str, Any]] = {}
        self._status_until = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._deployed: dict[str, float] = {}  # when each application was, in Unix seconds
        self._fingerprints: dict[str, tuple[float, str]] = {}  # of a backend, with the time it was deployed at

    async def _handle(self, backend: str) -> DeploymentHandle:
        handle = self._handles.get(backend)
        if handle is None:
            try:
                # Asks the controller and blocks: not on the loop. A controller that restarts would stop every stream.
                found = await asyncio.to_thread(serve.get_app_handle, backend)
            except TRANSPORT as error:
                raise BackendUnavailable(f"the application {backend} is not there: {error}") from None
            handle = self._handles[backend] = found.options(method_name="generate", stream=True, **PICKLED)
        return handle

    async def generate(self, backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """See BackendPort."""
        response = (await self._handle(backend)).remote(call)
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
            response.cancel()

    async def fingerprint(self, backend: str) -> str:
        """See BackendPort. Replicas are asked once for each time that their application is deployed."""
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
                told: str = await _answer(ask.remote())
        except Exception as error:  # an application of an older release, or none of ours, has no such method
            raise BackendUnavailable(f"{backend} does not tell its fingerprint: {type(error).__name__}") from None
        if status["status"] == "RUNNING":  # and no update is on its way, so that no older replica has answered
            self._fingerprints[backend] = (deployed, told)
        return told

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
            report = await asyncio.to_thread(serve.status)
        except TRANSPORT:
            return
        self._status = {
            name: {
                "status": str(application.status.value),
                "replicas": sum(
                    deployment.replica_states.get("RUNNING", 0) for deployment in application.deployments.values()
                ),
            }
            for name, application in report.applications.items()
        }
        self._deployed = {name: one.last_deployed_time_s for name, one in report.applications.items()}
        self._status_until = time.monotonic() + STATUS_S
