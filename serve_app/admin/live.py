"""Endpoint for current activity, which `serve-app top` polls. It requires the operator key.

It leaves no audit record, because it shows neither keys nor individual requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from typing import Annotated

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import (
    INTEGER,
    AccountId,
    AccountName,
    BackendName,
    Count,
    Currency,
    Instant,
    ModelId,
    Money,
    Query,
    Reply,
)
from serve_app.api import errors
from serve_app.contracts import limiting
from serve_app.contracts.calls import application_of
from serve_app.contracts.limiting import LiveReport
from serve_app.contracts.ports import BackendUnavailable

endpoint = Endpoints("Operator: Service", "operatorKey")

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(ge=0)]


class LiveTraffic(Reply):
    """A backend behind an identifier."""

    name: BackendName
    weight: Count = Field(examples=[100])
    share: Share = Field(description="Share of the identifier's requests, by weight.", examples=[1.0])


class LiveModel(Reply):
    """An identifier and its backends."""

    id: ModelId
    backends: list[LiveTraffic]


class LiveLoad(Reply):
    """The load of a backend's replicas, as they report it to the limiter."""

    replicas: Count = Field(description="Replicas that report.", examples=[2])
    running: Count = Field(description="Running requests.", examples=[2])
    waiting: Count = Field(description="Requests in the replicas' queues.")
    queue_age_s: Positive = Field(
        description="Waiting time of the oldest request: the lower median of the replicas.", examples=[0.0]
    )
    kv_used: Share = Field(description="Used share of the KV cache: the mean of the replicas.", examples=[0.12])
    queued_prefill_tokens: Count = Field(description="Prompt tokens in the replicas' queues.")
    tokens_per_s: Positive = Field(
        description="Tokens per second of started prompts and of output, over the last seconds.", examples=[840.0]
    )
    pressure: Positive = Field(
        description="The larger of two ratios: queueing delay to its target, and work in queued prompts to its target; "
        "above 1, the limits fall.",
        examples=[0.2],
    )
    effective_share: Share = Field(
        description="Share of the default contract's tokens per minute that may be used under the current pressure.",
        examples=[1.0],
    )


class LiveBackend(Reply):
    """An application that runs a model, with all its adapters."""

    name: BackendName
    status: str | None = Field(
        description="Status of the Ray Serve application; null: Serve can't be reached.", examples=["RUNNING"]
    )
    replicas: Count | None = Field(
        description="Number of replicas according to Serve; null: Serve can't be reached.", examples=[2]
    )
    load: LiveLoad | None = Field(description="null: no replica reports.")


class LiveAccount(Reply):
    """An account with open requests."""

    id: AccountId = Field(validation_alias="account_id")
    name: AccountName
    open_requests: Count = Field(examples=[2])
    held: Money = Field(description="Reserved for running requests.", examples=["0.01"])
    tokens_used: Count = Field(
        description="Tokens that count against the account's tightest token limit now.", examples=[18_400]
    )
    tokens_limit: Count = Field(description="The account's tightest token limit.", examples=[1_000_000])
    effective_share: Share = Field(
        description="Share of its tokens per minute that the account may use now on its most limited backend.",
        examples=[1.0],
    )


class LiveLimiter(Reply):
    """A limiter shard. If it does not answer, `admits` is null and its accounts are unknown."""

    shard: Count = Field(description="Number of the shard, from 0.")
    admits: bool | None = Field(description="Whether it admits requests; null: it does not answer.", examples=[True])
    open_requests: Count = Field(examples=[2])
    held: Money = Field(description="Reserved for running requests.", examples=["0.01"])


class LiveSpool(Reply):
    """Settlements that wait for the ledger in a gateway's spool, including spools that it took over."""

    settlements: Count
    bytes: Count
    age_s: Positive = Field(
        description="Seconds since the request of the oldest waiting settlement ended.", examples=[0.0]
    )
    ledger_away: bool = Field(
        description="The ledger is unavailable, so settlements go to the spool.", examples=[False]
    )


class LiveGateway(Reply):
    """A gateway, according to its last heartbeat."""

    holder: str = Field(description="Name of the gateway's process in metrics and logs.", examples=["gateway-1"])
    open_requests: Count = Field(examples=[2])
    spool: LiveSpool | None = Field(description="null: not measured yet.")


class Live(Reply):
    """Current activity. Figures of gateways, such as requests per second, are in the metrics."""

    at: Instant
    currency: Currency
    open_requests: Count = Field(examples=[2])
    held: Money = Field(description="Reserved for running requests.", examples=["0.01"])
    limiters: list[LiveLimiter]
    gateways: list[LiveGateway]
    models: list[LiveModel]
    backends: list[LiveBackend]
    accounts: list[LiveAccount] = Field(description="Accounts with the most open requests first.")


class LiveQuery(Query):
    top: Annotated[int, INTEGER] = Field(10, ge=0, le=100, description="Maximum number of accounts.")


@endpoint("GET", "/admin/live", "Show current activity", success="The activity at this moment.")
async def live(admin: AdminServices, query: LiveQuery) -> Live:
    """The call leaves no audit record, because the reply shows neither keys nor single requests."""
    answers = await admin.limiter.live(limiting.Live(query.top))
    reports = [report for report in answers if report is not None]
    if not reports:
        raise errors.overloaded("the limiter is restarting: try again", retry_after_s=2)
    accounts = [account for report in reports for account in report.accounts]
    busiest = nsmallest(query.top, accounts, key=lambda one: (-one.open_requests, -one.held, one.account_id))
    return Live.model_validate(
        {
            "at": admin.now(),
            "currency": admin.currency,
            "open_requests": sum(report.open_requests for report in reports),
            "held": sum(report.held for report in reports),
            "limiters": [_limiter(*one) for one in enumerate(answers)],
            "gateways": _gateways(reports),
            "models": _models(admin),
            "backends": await _backends(admin, reports),
            "accounts": [
                LiveAccount.from_fields(
                    one, tokens_used=one.tokens.limit - one.tokens.remaining, tokens_limit=one.tokens.limit
                )
                for one in busiest
            ],
        }
    )


def _limiter(shard: int, report: LiveReport | None) -> LiveLimiter:
    if report is None:
        return LiveLimiter.model_validate({"shard": shard, "admits": None, "open_requests": 0, "held": 0})
    return LiveLimiter.from_fields(report, shard=shard)


def _gateways(reports: Iterable[LiveReport]) -> list[LiveGateway]:
    """Merges the gateways of all shards, because only some shards may know a gateway that has just started."""
    found = {one.holder: one for report in reports for one in report.gateways}
    return [
        LiveGateway.from_fields(one, spool=None if one.spool is None else LiveSpool.from_fields(one.spool))
        for _, one in sorted(found.items())
    ]


def _models(admin: AdminServices) -> list[LiveModel]:
    catalogue, models = admin.catalogue(), []
    for name in catalogue.identifiers:
        weights = catalogue[name].backends
        total = max(1, sum(weights.values()))
        backends = [LiveTraffic(name=one, weight=weight, share=weight / total) for one, weight in weights.items()]
        models.append(LiveModel(id=name, backends=backends))
    return models


async def _backends(admin: AdminServices, reports: Sequence[LiveReport]) -> list[LiveBackend]:
    """Returns the backends that identifiers name, then other backends whose replicas still report."""
    try:
        status = await admin.status()
    except BackendUnavailable:
        status = None
    loads = _loads(reports)
    catalogue = admin.catalogue()
    named = [application_of(name) for model in catalogue.identifiers for name in catalogue[model].backends]
    return [
        LiveBackend.model_validate(
            {"name": name, "load": loads.get(name)}
            | (
                {"status": None, "replicas": None}
                if status is None
                else status.get(name, {"status": "MISSING", "replicas": 0})
            )
        )
        for name in dict.fromkeys([*named, *loads])
    ]


def _loads(reports: Iterable[LiveReport]) -> dict[str, LiveLoad]:
    """Returns the load by backend, from the shard that knows most of its replicas. Replicas report to every shard."""
    best: dict[str, limiting.BackendLoad] = {}
    for report in reports:
        for load in report.backends:
            known = best.get(load.backend)
            if load.replicas and (known is None or load.replicas > known.replicas):
                best[load.backend] = load
    return {name: LiveLoad.from_fields(load) for name, load in sorted(best.items())}
