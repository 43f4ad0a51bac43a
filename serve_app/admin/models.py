"""Endpoints for identifiers: list all, and create, change, remove and price them. They require the operator key."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, get_type_hints

import pydantic
from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.model_replies import (
    AdminModel,
    AdminModelDetails,
    AdminModelList,
    AdminPriceVersion,
    Removed,
    described,
    price_reply,
    traffic_reply,
)
from serve_app.admin.served import ServedView, check_known
from serve_app.admin.values import Body, TimeToCome, example, moment
from serve_app.api import errors
from serve_app.contracts import served_commands as commands
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import InvalidAmount
from serve_app.contracts.money import Price, price_per_million
from serve_app.contracts.served import (
    ALIAS_PATTERN,
    MAX_ALIASES,
    ModelSpec,
    SamplingDefaults,
    Seconds,
    Temperature,
    Tokens,
    check_aliases,
)
from serve_app.settings import IdentifierSettings

endpoint = Endpoints("Operator: Models", "operatorKey")

HISTORY = 50
_Backend = Annotated[str, Field(min_length=1, max_length=100)]
_Identifier = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_GivenWeights = Annotated[dict[_Backend, Annotated[int, Field(ge=0, le=1_000_000)]], Field(max_length=100)]
_Given = Annotated[
    str, Field(description="Price per million tokens, with at most three decimal places.", max_length=40)
]
_Temperatures = Annotated[dict[str, Temperature], Field(max_length=50, description="Recommended temperatures by use.")]
_Aliases = Annotated[
    list[Annotated[str, Field(pattern=ALIAS_PATTERN)]],
    Field(
        max_length=MAX_ALIASES,
        description="Further names for clients. A name with a final `*` stands for all names with this beginning.",
    ),
]
_DEFAULTS: dict[str, Any] = {
    name: (kind, None) for name, kind in get_type_hints(SamplingDefaults, include_extras=True).items()
}


class Prices(Body):
    """Prices per million tokens, as decimals."""

    model_config = example(input="0.27", cached_input="0.07", output="1.10")

    input: _Given
    cached_input: _Given
    output: _Given

    def per_token(self) -> Price:
        """Returns prices per token. Raises 422."""
        found = {}
        for name in ("input", "cached_input", "output"):
            try:
                found[name] = price_per_million(getattr(self, name))
            except InvalidAmount as error:
                raise errors.invalid_parameters(f"{name}: {error}", param=name) from None
        return Price(**found)


Sampling: Any = pydantic.create_model(
    "Sampling",
    __base__=Body,
    __doc__="Sampling defaults; null: the service's default.",
    **_DEFAULTS,
)


class ModelChanges(Body):
    """Changes of an identifier. Omitted fields stay unchanged."""

    model_config = example(max_output=8192, aliases=["gpt-4o-mini"])

    context_length: Tokens | None = Field(
        None, description="Maximum number of tokens of prompt and reply together; null: unchanged."
    )
    max_output: Tokens | None = Field(None, description="Maximum number of tokens of one choice; null: unchanged.")
    first_token_target_s: Seconds | None = Field(
        None, description="Target for the seconds to the first token; null: unchanged, or 5 for a new identifier."
    )
    output_token_target_s: Seconds | None = Field(
        None,
        description="Target for the seconds per output token, as the mean over a reply; null: unchanged, or 0.2 for a "
        "new identifier.",
    )
    recommended_temperatures: _Temperatures | None = None
    sampling: Sampling | None = None
    fallback: _Backend | None = Field(
        None, description="Backend that replies while the others have no capacity; null: no fallback."
    )
    aliases: _Aliases | None = None


class NewModel(ModelChanges):
    """A new identifier."""

    model_config = example(
        id="svc-summaries",
        context_length=32_768,
        max_output=4096,
        weights={"chat-v1": 100},
        price={"input": "0.27", "cached_input": "0.07", "output": "1.10"},
    )

    id: _Identifier
    context_length: Tokens = Field(description="Maximum number of tokens of prompt and reply together.")
    max_output: Tokens = Field(description="Maximum number of tokens of one choice.")
    weights: Annotated[_GivenWeights, Field(min_length=1, description="Weights by backend.")]
    price: Prices


class NewPrice(Prices):
    """A new price."""

    effective_at: TimeToCome | None = Field(
        None, description="A future time from which the price applies, with a UTC offset; null: now."
    )


@endpoint("GET", "/admin/models", "List identifiers and their backends", success="All identifiers.")
async def list_backends(admin: AdminServices) -> AdminModelList:
    """The list has the identifiers of `config.yaml`, followed by those that were created by a command or this API."""
    view = await ServedView.read(admin)
    return AdminModelList(data=[AdminModel.model_validate(described(view, name)) for name in view.identifiers])


@endpoint(
    "GET",
    "/admin/models/{id}",
    "Show an identifier and its history",
    success="The identifier, its traffic changes and its prices.",
    operation_id="showModel",
)
async def show_model(admin: AdminServices, id: str) -> AdminModelDetails:
    return await _details(admin, id)


@endpoint("POST", "/admin/models", "Create an identifier", success="The new identifier.", status=201)
async def create_model(admin: AdminServices, body: NewModel, audit: Audit) -> AdminModelDetails:
    """The backends must exist. A repeated call with the same values changes nothing."""
    view = await ServedView.read(admin)
    if view.is_configured(body.id):
        raise errors.invalid_parameters(f"id: {body.id} is declared in config.yaml", param="id")
    spec = _changed(ModelSpec(body.context_length, body.max_output), body)
    weights = {name: weight for name, weight in body.weights.items() if weight}
    check_known(view, {*weights, *([spec.fallback] if spec.fallback else [])})
    _check_aliases(view, body.id, spec)
    await admin.run(commands.CreateModel(body.id, spec, weights, body.price.per_token(), audit))
    return await _details(admin, body.id)


@endpoint(
    "PATCH",
    "/admin/models/{id}",
    "Change an identifier",
    success="The changed identifier.",
    operation_id="updateModel",
)
async def update_model(admin: AdminServices, id: str, body: ModelChanges, audit: Audit) -> AdminModelDetails:
    """Only for an identifier that is not in `config.yaml`. null removes `fallback` and `sampling`."""
    view = await _created(admin, id)
    spec = _changed(view.served.models[id].spec, body)
    check_known(view, {spec.fallback} if spec.fallback and "fallback" in body.model_fields_set else set())
    _check_aliases(view, id, spec)
    await admin.run(commands.UpdateModel(id, spec, audit))
    return await _details(admin, id)


@endpoint(
    "DELETE",
    "/admin/models/{id}",
    "Remove an identifier",
    success="The id that is no longer served.",
    operation_id="removeModel",
)
async def remove_model(admin: AdminServices, id: str, audit: Audit) -> Removed:
    """Only for an identifier that is not in `config.yaml`. Its history and its usage stay."""
    if id in admin.catalogue().configured:
        raise _declared(id)
    await admin.run(commands.RemoveModel(id, audit))
    return Removed(id=id)


@endpoint(
    "POST",
    "/admin/models/{id}/prices",
    "Set or schedule a price",
    success="The new price.",
    operation_id="schedulePrice",
)
async def schedule_price(admin: AdminServices, id: str, body: NewPrice, audit: Audit) -> AdminPriceVersion:
    """A request is billed at the price at which it was admitted, so running requests keep the old price.

    A second price for the same time replaces the first. The price takes precedence over the one in `config.yaml`.
    """
    view = await ServedView.read(admin)
    view.check_identifier(id)
    at = None if body.effective_at is None else moment(body.effective_at, "effective_at")
    command = commands.SchedulePrice(id, body.per_token(), at, view.is_configured(id), audit)
    return price_reply(await admin.run(command))


async def _details(admin: AdminServices, identifier: str) -> AdminModelDetails:
    view = await ServedView.read(admin)
    view.check_identifier(identifier)
    spec = view.spec(identifier)
    history = await admin.run(commands.ListTraffic(identifier, limit=HISTORY))
    prices = await admin.run(commands.ListPrices(identifier))
    sampling = {} if isinstance(spec, IdentifierSettings) else asdict(spec.sampling)
    return AdminModelDetails.model_validate(
        {
            **described(view, identifier),
            "first_token_target_s": spec.first_token_target_s,
            "output_token_target_s": spec.output_token_target_s,
            "recommended_temperatures": dict(spec.recommended_temperatures),
            "sampling": {name: value for name, value in sampling.items() if value is not None},
            "history": [traffic_reply(row) for row in history],
            "prices": [price_reply(one) for one in prices],
        }
    )


async def _created(admin: AdminServices, identifier: str) -> ServedView:
    """Returns the view of an identifier that a command created. Raises 422 if `config.yaml` has it, 404 if unknown."""
    view = await ServedView.read(admin)
    view.check_identifier(identifier)
    if view.is_configured(identifier):
        raise _declared(identifier)
    return view


def _check_aliases(view: ServedView, identifier: str, spec: ModelSpec) -> None:
    """Raises 422 for an invalid alias. The ledger can't check it: it knows no identifiers of `config.yaml`."""
    aliases = {name: view.spec(name).aliases for name in view.identifiers} | {identifier: spec.aliases}
    try:
        check_aliases(aliases)
    except ValueError as error:
        raise errors.invalid_parameters(str(error), param="aliases") from None


def _declared(identifier: str) -> errors.ApiError:
    return errors.invalid_parameters(f"{identifier} is declared in config.yaml: change it there", param="id")


def _changed(spec: ModelSpec, body: ModelChanges) -> ModelSpec:
    """Merges the body into the spec. null removes `fallback` or `sampling`, and leaves other fields unchanged."""
    names = body.model_fields_set & {*ModelChanges.model_fields}
    values = {name: getattr(body, name) for name in names}
    if "sampling" in values:
        values["sampling"] = SamplingDefaults(**(values["sampling"].model_dump() if values["sampling"] else {}))
    if values.get("aliases") is not None:
        values["aliases"] = tuple(values["aliases"])
    return replace(spec, **{name: value for name, value in values.items() if value is not None or name == "fallback"})
