"""Runs the ledger's backends as Serve applications: starts and deletes them as `serve run` and `serve delete` would.

`serve deploy` (ray 2.60) deletes only applications from an earlier config file, so it keeps these backends.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import RunTarget
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from serve_app.contracts.ports import BackendUnavailable
from serve_app.contracts.served import Backend

DEPLOY_S = 120.0  # timeout of a deployment


class BackendApplications:
    """Implements ApplicationsPort."""

    async def deploy(self, backend: Backend) -> None:
        """See ApplicationsPort."""
        await _run(_deploy, backend.name, dict(backend.args), dict(backend.options))

    async def delete(self, backend: Backend) -> None:
        """See ApplicationsPort."""
        await asyncio.to_thread(_delete, backend.name)


@ray.remote(num_cpus=0, max_calls=1, max_retries=0)
def _deploy(name: str, args: dict[str, Any], options: dict[str, Any]) -> None:
    """Deploys a backend. Runs in a separate process, because a gateway does not load the modules that models need."""
    from deployments.apps import backend

    # Two gateways may do this at the same time. Serve ignores the second deployment if the version is the same.
    content = json.dumps([args, options], sort_keys=True)
    version = hashlib.sha256(content.encode()).hexdigest()[:16]
    application = backend(args, options, version)
    serve.run_many(
        [RunTarget(application, name=name, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


async def _run(task: Any, *arguments: Any) -> None:
    try:
        await asyncio.to_thread(lambda: ray.get(task.remote(*arguments), timeout=DEPLOY_S))
    except (RayError, RayServeException) as error:
        raise BackendUnavailable(f"not deployed: {error}") from None


def _delete(name: str) -> None:
    try:
        applications = _get_global_client().get_serve_details()["applications"]
        if name in applications and applications[name]["source"] == "imperative":
            serve.delete(name, _blocking=False)
    except (RayError, RayServeException) as error:
        raise BackendUnavailable(f"not deleted: {error}") from None
