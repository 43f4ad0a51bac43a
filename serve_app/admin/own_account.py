"""Endpoints for an account's management key: its balance, usage and requests."""

from __future__ import annotations

from serve_app.admin import public, usage
from serve_app.admin.accounts import OwnAccount, states_of
from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.requests import known_id
from serve_app.admin.usage import OwnFilters, RequestPage, RequestRecord
from serve_app.api import errors
from serve_app.contracts import commands
from serve_app.contracts.limiting import Identity

TAG = "Account management"

endpoint = Endpoints(TAG, "managementKey")


class OwnSumsQuery(public.OwnUsageQuery, OwnFilters):
    """GET /account/usage."""


class OwnRequestsQuery(usage.Page, OwnFilters):
    """GET /account/requests."""


@endpoint("GET", "/account", "Show the account, its balance and limits", success="The account as it is now.")
async def show_own_account(admin: AdminServices, identity: Identity) -> OwnAccount:
    [status] = await states_of(admin, (identity.account_id,))
    # Read the ledger after the limiter: the charge of a hold that ends between the two reads is then in the balance.
    account = await admin.run(commands.GetAccount(identity.account_id))
    return OwnAccount.from_snapshot(admin.now(), account, status)


@endpoint("GET", "/account/usage", "Sum the account's usage by group", success="One row for each group with requests.")
async def sum_own_usage(admin: AdminServices, query: OwnSumsQuery, identity: Identity) -> public.UsageList:
    """A request counts on the day in UTC on which it ended. A reply has at most 5,000 rows; more return 422."""
    days, groups = (query.first, query.last), tuple(query.group_by)
    return await public.usage_of(
        admin,
        commands.SumUsage(identity.account_id, query.key, query.model, *days, groups, query.tag, public.MAX_GROUPS),
        identity,
    )


@endpoint(
    "GET", "/account/requests", "List the account's requests as billed", success="A page of requests, oldest first."
)
async def list_own_requests(admin: AdminServices, query: OwnRequestsQuery, identity: Identity) -> RequestPage:
    """A request is listed once it is billed. Failed requests are listed as well and cost nothing."""
    span = usage.span(query)
    wanted = commands.ListUsage(identity.account_id, query.key, query.model, *span, query.after, query.limit, query.tag)
    return await usage.page_of(admin, wanted)


@endpoint("GET", "/account/requests/{request_id}", "Show a request as billed", success="The request as billed.")
async def show_own_request(admin: AdminServices, request_id: str, identity: Identity) -> RequestRecord:
    """A request that is not billed yet, or that was refused, returns 404."""
    record = await admin.run(commands.FindRequest(await known_id(admin, request_id)))
    if record is None or record.account_id != identity.account_id:
        raise errors.not_found("this account has no such request, it is not billed yet, or its month is archived")
    return RequestRecord.from_record(record)
