"""Endpoints for API keys that generate nothing: models, balance, usage. Also the health checks, which need no key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from serve_app import __version__
from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.usage import Days, Groups, TokenSums, listed
from serve_app.admin.values import Currency, ModelId, Money, Reply, Time
from serve_app.api import errors
from serve_app.contracts import commands
from serve_app.contracts.calls import application_of
from serve_app.contracts.limiting import Identity
from serve_app.contracts.ports import BackendUnavailable
from serve_app.contracts.units import utc_text
from serve_app.gateway.backends import system_fingerprint
from serve_app.gateway.lifecycle import is_ready

RECOMMENDED_TEMPERATURES: Final[Mapping[str, Mapping[str, float]]] = {
    "svc-chat": {
        "coding_and_math": 0.0,
        "data_cleaning_and_analysis": 0.7,
        "conversation": 1.0,
        "translation": 1.1,
        "creative_writing_and_poetry": 1.25,
    },
    "svc-coder": {"programming_and_math": 1.0},
}
"""Recommended temperatures by use, from the published description of the models."""

#: Maximum number of rows in a usage answer. Every GROUPS_OF_A_QUERY rows count as one more query against the rate limit
#: of queries, because large answers take time on the gateway.
MAX_GROUPS: Final = 5000
GROUPS_OF_A_QUERY: Final = 100
_CREATED: Final = 1735689600  # `created` of every identifier: 2025-01-01. It stays the same when backends change

of_models = Endpoints("Models", "apiKey")
of_account = Endpoints("Account", "apiKey")
of_service = Endpoints("Service", None)


class Model(Reply):
    """One identifier."""

    id: ModelId
    object: Literal["model"]
    type: Literal["model"]
    display_name: ModelId
    created: int = Field(description="Unix time in seconds.", examples=[_CREATED])
    created_at: Time = Field(examples=[utc_text(_CREATED)])
    owned_by: str = Field(examples=["serve-app"])
    lifecycle: Literal["active"]
    alias_of: str | None = Field(
        description="The identifier, if `id` is one of its aliases; else null.", examples=[None]
    )
    aliases: list[str] = Field(
        description="Other names for requests. A name with a final `*` stands for all names with this beginning.",
        examples=[["gpt-4o-mini"]],
    )
    context_length: int = Field(
        ge=1, description="Maximum number of tokens of prompt and reply together.", examples=[32_768]
    )
    max_model_len: int = Field(ge=1, description="Same as `context_length`.", examples=[32_768])
    max_input_tokens: int = Field(
        ge=1, description="Same as `context_length`, which counts the reply, too.", examples=[32_768]
    )
    max_output_length: int = Field(ge=1, description="Maximum number of tokens of one choice.", examples=[4096])
    max_tokens: int = Field(ge=1, description="Same as `max_output_length`.", examples=[4096])
    recommended_temperatures: dict[str, Annotated[float, Field(ge=0, le=2)]] = Field(
        description="By use. These are recommendations and are not enforced.",
        examples=[{"coding_and_math": 0.0, "conversation": 1.0}],
    )
    system_fingerprints: list[str] = Field(
        description="Current values of `system_fingerprint` in replies; empty while no backend answers.",
        examples=[["fp_1"]],
    )


class ModelList(Reply):
    """All identifiers and their aliases, except for those with `*`. There is only one page."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None = Field(examples=["svc-chat"])
    last_id: str | None = Field(examples=["svc-chat"])


class BalanceInfo(Reply):
    """The balance in one currency, without expired grants."""

    currency: Currency = Field(pattern="^[A-Z]{3}$", description="ISO 4217.")
    total_balance: Money = Field(description="Sum of the other two.")
    granted_balance: Money = Field(description="What is left of the grants.", examples=["2.50"])
    topped_up_balance: Money = Field(description="What is left of the payments.", examples=["10.00"])


class Balance(Reply):
    """The remaining balance."""

    is_available: bool = Field(description="Whether any balance is left.")
    balance_infos: list[BalanceInfo]


class UsageSums(TokenSums, Groups):
    """Sums of one group; fields that are not grouped by are absent."""


class UsageList(Reply):
    """Usage by group."""

    object: Literal["list"]
    data: list[UsageSums]


class OwnUsageQuery(Days):
    group_by: Annotated[
        list[Literal["day", "model", "key", "tag"]], BeforeValidator(lambda text: listed(text or "day"))
    ] = Field(["day"], description="Comma-separated. A key with several tags counts in each of them.")


class Health(Reply):
    """The process is alive."""

    status: Literal["alive"]
    version: str = Field(examples=[__version__])


class Ready(Reply):
    """Every identifier has a backend that can reply."""

    status: Literal["ready"]
    backends: list[str] = Field(description="Backends that can reply.", examples=[["chat-v1"]])


@of_models("GET", "/models", "List models", success="The models.")
async def list_models(admin: AdminServices) -> ModelList:
    catalogue = admin.catalogue()
    names = [*catalogue.identifiers, *(alias for alias in catalogue.served.aliases if alias not in catalogue)]
    models = await asyncio.gather(*(_model(admin, name) for name in names))
    return ModelList(object="list", data=models, has_more=False, first_id=names[0], last_id=names[-1])


@of_models("GET", "/models/{id}", "Show a model", success="The model.")
async def get_model(admin: AdminServices, id: str) -> Model:
    catalogue = admin.catalogue()
    if catalogue.served.identifier_of(id) not in catalogue:
        served = ", ".join(catalogue.identifiers)
        raise errors.not_found(f"the model {id!r} does not exist: use one of {served}")
    return await _model(admin, id)


@of_account("GET", "/user/balance", "Show your account's balance", success="The balance.")
async def get_balance(admin: AdminServices, identity: Identity) -> Balance:
    account = await admin.run(commands.GetAccount(identity.account_id))
    total = account.available(admin.now())  # without expired grants
    info = {
        "currency": account.currency,
        "total_balance": total,
        "granted_balance": total - account.topped_up,
        "topped_up_balance": account.topped_up,
    }
    return Balance(is_available=total > 0, balance_infos=[BalanceInfo.model_validate(info)])


@of_account("GET", "/user/usage", "Sum your account's usage by group", success="One row for each group.")
async def get_usage(admin: AdminServices, query: OwnUsageQuery, identity: Identity) -> UsageList:
    """A request counts on the day in UTC on which it ended. A reply has at most 5,000 rows; more return 422."""
    groups = tuple(query.group_by)
    wanted = commands.SumUsage(identity.account_id, None, None, query.first, query.last, groups, most=MAX_GROUPS)
    return await usage_of(admin, wanted, identity)


async def usage_of(admin: AdminServices, wanted: commands.SumUsage, identity: Identity | None = None) -> UsageList:
    found = await admin.run(wanted)
    if identity is not None:
        admin.queries.charge(identity, len(found) // GROUPS_OF_A_QUERY)
    sums = [UsageSums.from_row(row).model_dump(exclude_none=True) for row in found]
    return UsageList(object="list", data=[UsageSums(**one) for one in sums])


@of_service("GET", "/health", "Check whether the service is alive", success="The service is alive.")
async def get_health(admin: AdminServices) -> Health:
    return Health(status="alive", version=__version__)


@of_service(
    "GET", "/ready", "Check whether the service can answer", success="The service can answer.", more_errors=(503,)
)
async def get_ready(admin: AdminServices) -> Ready:
    if (disagreement := admin.limiter.disagreement) is not None:
        raise errors.overloaded(f"no requests are admitted: {disagreement}", retry_after_s=2)
    status = await admin.backend_status()
    catalogue = admin.catalogue()
    ready = [name for name in catalogue.backends() if is_ready(status.get(application_of(name)))]
    missing = [name for name in catalogue.identifiers if not set(catalogue.behind(name)) & set(ready)]
    if missing:
        waited_for = ", ".join(dict.fromkeys(backend for name in missing for backend in catalogue.behind(name)))
        message = f"no replica of {waited_for} is ready yet, so {', '.join(missing)} can't reply: try again"
        raise errors.overloaded(message, retry_after_s=2)
    return Ready(status="ready", backends=ready)


async def _model(admin: AdminServices, name: str) -> Model:
    """Describes an identifier or an alias. The fingerprints of unreachable backends are missing."""
    catalogue = admin.catalogue()
    identifier = catalogue.served.identifier_of(name)
    settings = catalogue[identifier]

    async def shown_fingerprint(backend: str) -> str | None:
        try:
            return system_fingerprint(backend, await admin.backends.fingerprint(backend))
        except BackendUnavailable:
            return None

    fingerprints = await asyncio.gather(*map(shown_fingerprint, catalogue.behind(identifier)))
    return Model(
        id=name,
        object="model",
        type="model",
        display_name=name,
        created=_CREATED,
        created_at=utc_text(_CREATED),
        owned_by="serve-app",
        lifecycle="active",
        alias_of=None if name == identifier else identifier,
        aliases=settings.aliases if name == identifier else [],
        context_length=settings.context_length,
        max_model_len=settings.context_length,
        max_input_tokens=settings.context_length,
        max_output_length=settings.max_output,
        max_tokens=settings.max_output,
        recommended_temperatures=dict(
            settings.recommended_temperatures or RECOMMENDED_TEMPERATURES.get(identifier, {"default": 1.0})
        ),
        system_fingerprints=[one for one in fingerprints if one is not None],
    )
