"""Ray handles behind the gateway's protocols. Errors of the transport become the protocols' own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.backend.messages import BackendEvent, GenerateCall, Rejected, Rejection
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.ports import BackendUnavailable
from serve_app.ledger import LedgerError, LedgerUnavailable
from serve_app.ledger.messages import Settled, Settlement, SettlementRejected


class LimiterHandle:
    """LimiterPort over a handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._ask = handle.options(method_name="ask")

    async def ask(self, asks: list[Any]) -> Sequence[Any]:
        """See LimiterPort."""
        answers: list[Any] = await self._ask.remote(asks)
        return answers


class AccountingHandle:
    """AccountingPort over a handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._settle = handle.options(method_name="settle")
        self._call = handle.options(method_name="call")

    async def settle(self, settlements: list[Settlement]) -> Sequence[Settled | SettlementRejected]:
        """See AccountingPort."""
        answers = await self._settle.remote(settlements)
        for answer in answers:
            if isinstance(answer, LedgerUnavailable):
                raise answer  # the whole list is asked again: what is settled already answers as before
        return answers

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """See AccountingPort. Raises Unavailable when the ledger's process is away."""
        try:
            answer = await self._call.remote(operation, arguments)
        except RayTaskError:
            raise  # a fault of the operation itself, not of its transport
        except (RayError, RayServeException) as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from None
        if isinstance(answer, LedgerError):
            raise answer
        return answer


class BackendHandles:
    """BackendPort: each backend is an application of its own, found by name when it is first needed."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle] = {}

    def _handle(self, backend: str) -> DeploymentHandle:
        handle = self._handles.get(backend)
        if handle is None:
            try:
                found = serve.get_app_handle(backend)
            except (RayError, RayServeException) as error:
                raise BackendUnavailable(f"the application {backend} is not there: {error}") from None
            handle = self._handles[backend] = found.options(method_name="generate", stream=True)
        return handle

    async def generate(self, backend: str, call: GenerateCall) -> AsyncGenerator[BackendEvent, None]:
        """See BackendPort."""
        response = self._handle(backend).remote(call)
        try:
            async for event in response:
                yield event
        except BackPressureError:
            yield Rejected(Rejection.QUEUE_FULL)
        except RayTaskError:
            raise  # the replica is alive and its code failed
        except (RayError, RayServeException) as error:
            raise BackendUnavailable(f"{type(error).__name__}: {error}") from None
        finally:
            response.cancel()

    async def status(self) -> dict[str, dict[str, Any]]:
        """See BackendPort."""
        report = await asyncio.to_thread(serve.status)
        return {
            name: {
                "status": str(application.status.value),
                "replicas": sum(
                    deployment.replica_states.get("RUNNING", 0) for deployment in application.deployments.values()
                ),
            }
            for name, application in report.applications.items()
        }
