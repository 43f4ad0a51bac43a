"""Endpoints for backends: those in `config.yaml` and those deployed separately. They require the operator key."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.model_replies import Share, Source
from serve_app.admin.served import ServedView
from serve_app.admin.values import BackendName, Body, Count, ModelId, Reply, Time, example
from serve_app.api import errors
from serve_app.contracts import served_commands as commands
from serve_app.contracts.books import Audit
from serve_app.settings import ModelArgs, SettingsError, parse

endpoint = Endpoints("Operator: Models", "operatorKey")

_Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Positive = Annotated[float, Field(gt=0)]
_ARGS: Final[dict[str, Any]] = {"model": "bundled", "dtype": "int8", "max_context": 32_768}


class ServedBy(Reply):
    """An identifier whose requests go to the backend, or can go to it as the fallback."""

    model: ModelId
    share: Share
    is_fallback: bool = Field(examples=[False])


class Deployed(Reply):
    """A backend and the identifiers that it serves."""

    name: BackendName
    source: Source = Field(description="Where the backend is declared.", examples=["ledger"])
    status: str = Field(
        description="Status of the Ray Serve application; MISSING: Serve has no such application.",
        examples=["RUNNING"],
    )
    replicas: Count = Field(examples=[2])
    healthy: bool = Field(
        description="Whether it can take requests: a replica runs, or one starts with the first request."
    )
    serves: list[ServedBy]
    args: dict[str, Any] | None = Field(
        description="The engine's settings; null: they are in `config.yaml`.", examples=[_ARGS]
    )
    options: dict[str, Any] | None = Field(
        description="Deployment options; null: they are in `config.yaml`.", examples=[{"num_replicas": 2}]
    )
    created_at: Time | None = Field(description="null: the backend is declared in `config.yaml`.")
    retired_at: Time | None = Field(
        description="When the backend was retired. It gets no new requests and stops after its last stream. null: it "
        "is not retired.",
        examples=[None],
    )
    message: str = Field(description="Serve's explanation of an unexpected status; else empty.", examples=[""])


class DeployedList(Reply):
    """All backends that an identifier names or that are deployed."""

    data: list[Deployed]


class BackendOptions(Body):
    """Deployment options, as in `config.yaml`."""

    num_replicas: Annotated[int, Field(ge=1, le=1000)] | None = None
    autoscaling_config: dict[str, Any] | None = None
    ray_actor_options: dict[str, Any] | None = None
    max_ongoing_requests: Annotated[int, Field(ge=1)] | None = None
    graceful_shutdown_timeout_s: _Positive | None = None
    health_check_period_s: _Positive | None = None
    health_check_timeout_s: _Positive | None = None


class NewBackend(Body):
    """A new backend."""

    model_config = example(name="chat-v2", args=_ARGS, options={"num_replicas": 2})

    name: _Name
    args: dict[str, Any] = Field(
        description="The engine's settings, in the form of an application's `args` in `config.yaml`."
    )
    options: BackendOptions = BackendOptions()


@endpoint("GET", "/admin/backends", "List backends", success="All backends.", operation_id="listDeployed")
async def list_deployed(admin: AdminServices) -> DeployedList:
    """The list has the backends of identifiers, followed by others that are deployed."""
    view = await ServedView.read(admin)
    return DeployedList(data=[_deployed(view, name) for name in view.backends])


@endpoint(
    "GET",
    "/admin/backends/{name}",
    "Show a backend",
    success="The backend as it is now.",
    operation_id="showDeployed",
)
async def show_deployed(admin: AdminServices, name: str) -> Deployed:
    view = await ServedView.read(admin)
    if name not in view.served.backends and name not in view.backends:
        raise errors.not_found(f"there is no backend {name!r}: list the backends to see those that exist")
    return _deployed(view, name)


@endpoint(
    "POST", "/admin/backends", "Deploy a backend", success="The backend, which may still be starting.", status=201
)
async def deploy_backend(admin: AdminServices, body: NewBackend, audit: Audit) -> Deployed:
    """The reply comes before the first replica is ready: read the backend again until `healthy` is true.

    The backend gets no requests until an identifier gives it a weight. The settings of a name never change: deploy
    other settings under another name.
    """
    view = await ServedView.read(admin)
    if body.name in view.status and body.name not in view.served.backends:
        raise errors.invalid_parameters(f"name: {body.name} is already an application in config.yaml", param="name")
    try:
        parse(ModelArgs, body.args, "args")
    except SettingsError as error:
        raise errors.invalid_parameters(str(error), param="args") from None
    options = body.options.model_dump(exclude_none=True)
    if {"num_replicas", "autoscaling_config"} <= options.keys():
        raise errors.invalid_parameters("options: use either num_replicas or autoscaling_config", param="options")
    await admin.run(commands.DeployBackend(body.name, body.args, options, audit))
    return _deployed(await ServedView.read(admin), body.name)


@endpoint(
    "POST",
    "/admin/backends/{name}/retire",
    "Retire a backend",
    success="The retired backend.",
    operation_id="retireBackend",
)
async def retire_backend(admin: AdminServices, name: str, audit: Audit) -> Deployed:
    """The backend stops once its replies have ended. No identifier may still use it, also not as fallback.

    To bring it back, deploy it again with the same settings.
    """
    view = await ServedView.read(admin)
    if name not in view.served.backends and view.is_known(name):
        raise errors.invalid_parameters(
            f"{name} is an application of config.yaml: remove it there and run `serve deploy`", param="name"
        )
    if users := view.users(name):
        raise errors.invalid_parameters(
            f"{name} still serves {', '.join(users)}: set its weight to 0 and remove it as fallback first", param="name"
        )
    await admin.run(commands.RetireBackend(name, audit))
    return _deployed(await ServedView.read(admin), name)


def _deployed(view: ServedView, name: str) -> Deployed:
    state, backend = view.state(name), view.served.backends.get(name)
    return Deployed.model_validate(
        {
            "name": name,
            "source": "config.yaml" if backend is None else "ledger",
            "status": state["status"],
            "replicas": state["replicas"],
            "healthy": view.is_ready(name) and (backend is None or backend.retired_at is None),
            "serves": [{"model": model, **use} for model, use in view.users(name).items()],
            "args": None if backend is None else dict(backend.args),
            "options": None if backend is None else dict(backend.options),
            "created_at": None if backend is None else backend.created_at,
            "retired_at": None if backend is None else backend.retired_at,
            "message": str(state.get("message", "")),
        }
    )
