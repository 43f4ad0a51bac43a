"""Backends of the ledger as Serve's applications, and what of Serve's report counts as a backend that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ApplicationStatus

from deployments import applications, apps, handles
from deployments.applications import BackendApplications
from deployments.handles import BackendHandles
from serve_app.contracts.ports import BackendUnavailable
from serve_app.contracts.served import Backend
from serve_app.settings import SettingsError


def deployment_of(application: Any) -> Any:
    """The deployment of a model behind its entrance."""
    [model] = application._bound_deployment.init_args
    return model._bound_deployment


RETIRED = Backend("canary", 3, {"model": "bundled"}, {}, 1.0, retired_at=2.0)


def test_a_backend_has_the_options_of_its_deployment_and_the_rest_as_every_model() -> None:
    options = {"num_replicas": 2, "ray_actor_options": {"num_gpus": 1}}
    deployment = deployment_of(apps.backend({"model": "bundled"}, options, "v1"))
    assert (deployment.num_replicas, deployment.version) == (2, "v1")
    assert deployment.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 600


def test_changed_args_start_new_replicas_before_the_old_ones_end() -> None:
    for application in (apps.model({"model": "bundled"}), apps.backend({"model": "bundled"}, {}, "v1")):
        assert deployment_of(application)._deployment_config.max_surge_percent == 100


def test_wrong_args_of_a_backend_are_named() -> None:
    with pytest.raises(SettingsError, match=r"args\.dtyp"):
        apps.backend({"model": "bundled", "dtyp": "int8"}, {}, "v1")


@pytest.mark.parametrize(("source", "deleted"), [("imperative", ["canary"]), ("declarative", [])])
async def test_only_what_was_deployed_by_command_is_deleted(
    monkeypatch: pytest.MonkeyPatch, source: str, deleted: list[str]
) -> None:
    gone: list[str] = []
    details = {"applications": {"canary": {"source": source}}}
    monkeypatch.setattr(applications, "_get_global_client", lambda: SimpleNamespace(get_serve_details=lambda: details))
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: gone.append(name))
    await BackendApplications().delete(RETIRED)
    assert gone == deleted


async def test_a_controller_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> Any:
        raise serve.exceptions.RayServeException("no controller")

    monkeypatch.setattr(applications, "_get_global_client", away)
    with pytest.raises(BackendUnavailable, match="no controller"):
        await BackendApplications().delete(RETIRED)


def report(status: ApplicationStatus, running: int | None) -> dict[str, Any]:
    replicas = [{"state": "STARTING"}, *({"state": "RUNNING"} for _ in range(running or 0))]
    deployments = {} if running is None else {"Model": {"message": "", "replicas": replicas}}
    return {"smollm2": {"status": status, "message": "", "last_deployed_time_s": 1.0, "deployments": deployments}}


async def test_while_an_application_is_built_anew_its_replicas_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.handles.STATUS_S", 0.0)
    backends, seen = BackendHandles(), []
    for now in (
        report(ApplicationStatus.DEPLOYING, None),  # for the first time: nothing runs yet
        report(ApplicationStatus.RUNNING, 2),
        report(ApplicationStatus.DEPLOYING, None),
        report(ApplicationStatus.DEPLOY_FAILED, None),
        report(ApplicationStatus.DEPLOYING, 1),
        report(ApplicationStatus.DELETING, None),
    ):
        monkeypatch.setattr(handles, "_applications", lambda now=now: now)
        await backends._ask_status()
        seen.append(backends._status["smollm2"]["replicas"])
    assert seen == [0, 2, 2, 2, 1, 0]
