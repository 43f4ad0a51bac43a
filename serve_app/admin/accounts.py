"""Endpoints for accounts, their funds and limits. They require the operator key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.usage import TokenSums
from serve_app.admin.values import (
    INTEGER,
    AccountId,
    AccountName,
    Amount,
    BackendName,
    Body,
    Count,
    Currency,
    Money,
    Name,
    Next,
    Query,
    Reply,
    Time,
    TimeToCome,
    amount_of,
    example,
    expiry_of,
    limits_in,
)
from serve_app.api import errors
from serve_app.contracts import commands
from serve_app.contracts.books import AccountSnapshot, Audit, GrantSnapshot, UsageRow
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.limiting import AccountStatus, Status
from serve_app.contracts.limits import ACCOUNT_LIMITS

endpoint = Endpoints("Operator: Accounts", "operatorKey")

ONE: Final = "/admin/accounts/{account_id}"
CreditKind = Literal["top_up", "grant"]
_KIND: Final = "`top_up`: money that was paid. `grant`: money that is given, which may expire."

_GivenLimits: Any = limits_in(Body, ACCOUNT_LIMITS)
_OwnLimits: Any = limits_in(Reply, ACCOUNT_LIMITS)
_AppliedLimits: Any = limits_in(Reply, [name for name in ACCOUNT_LIMITS if name != "weight"], nullable=False)


class Limits(_AppliedLimits):
    """Requests and tokens per minute, and concurrent requests."""


class Contract(_OwnLimits):
    """An account's own limits and weight; null: the service's default applies."""


class Pressed(Reply):
    """A backend under pressure, and the tokens per minute that the account may use on it."""

    backend: BackendName
    tpm: int = Field(description="Tokens per minute.", examples=[400_000])


class Expiring(Reply):
    """A grant with an expiry, and the amount left."""

    expires_at: Time = Field(examples=["2026-12-31T00:00:00Z"])
    left: Money = Field(examples=["2.50"])


_NO_USAGE: Final[dict[str, Any]] = {**dict.fromkeys(TokenSums.model_fields, 0), "charged": "0.00"}


class AccountUsage(TokenSums):
    """The account's usage since its creation."""

    model_config = example(**_NO_USAGE)


class OwnAccount(Reply):
    """An account as its holder sees it."""

    id: AccountId = Field(validation_alias="account_id")
    name: AccountName
    currency: Currency
    balance: Money = Field(description="Sum of `granted` and `topped_up`.")
    available: Money = Field(description="Balance without expired grants.")
    granted: Money = Field(description="What is left of the grants.", examples=["0.00"])
    topped_up: Money = Field(description="What is left of the payments.", examples=["12.50"])
    expiring: list[Expiring] = Field(description="Grants that will expire, soonest first.", examples=[[]])
    held: Money = Field(description="Reserved for running requests.", examples=["0.00"])
    open_requests: Count = Field(examples=[0])
    limits: Limits
    effective: Limits = Field(description="Limits reduced by the current backend pressure.")
    created_at: Time

    @classmethod
    def from_snapshot(cls, now: float, account: AccountSnapshot, status: AccountStatus, /, **more: Any) -> Self:
        limits, effective = limits_of(account, status)
        return cls.from_fields(
            account,
            balance=account.balance,
            available=account.available(now),
            expiring=[{"expires_at": at, "left": left} for at, left in account.expiring if at > now],
            held=status.held,
            open_requests=status.open_requests,
            limits=limits,
            effective=effective,
            **more,
        )


class Account(OwnAccount):
    """An account as operators see it."""

    status: Literal["active", "suspended"]
    weight: int = Field(description="Share of a backend under pressure, relative to other accounts.", examples=[100])
    pressure: list[Pressed] = Field(description="Backends that limit the account now.", examples=[[]])
    contract: Contract
    usage: AccountUsage

    @classmethod
    def from_usage(cls, now: float, account: AccountSnapshot, status: AccountStatus, usage: UsageRow) -> Self:
        return cls.from_snapshot(
            now,
            account,
            status,
            status="active" if account.active else "suspended",
            weight=limits_of(account, status)[0]["weight"],
            pressure=[{"backend": backend, "tpm": tpm} for backend, tpm in status.pressed],
            contract={name: account.limits.get(name) for name in ACCOUNT_LIMITS},
            usage=AccountUsage.from_row(usage),
        )


class AccountPage(Reply):
    """A page of accounts."""

    data: list[Account]
    next: Next


class Grant(Reply):
    """A granted credit."""

    id: int = Field(validation_alias="grant_id", examples=[1042])
    status: Literal["open", "spent", "expired"]
    amount: Money = Field(examples=["5.00"])
    left: Money = Field(examples=["2.50"])
    created_at: Time
    expires_at: Time | None = Field(description="null: never.", examples=["2026-12-31T00:00:00Z"])
    memo: str = Field(examples=["Welcome credit"])

    @classmethod
    def from_snapshot(cls, now: float, grant: GrantSnapshot) -> Grant:
        expired = grant.expires_at is not None and grant.expires_at <= now
        return cls.from_fields(grant, status="expired" if expired else "spent" if not grant.left else "open")


class GrantList(Reply):
    """All grants of an account."""

    data: list[Grant]


class AccountsQuery(Query):
    after: str | None = Field(None, description="`next` of the previous page.")
    limit: Annotated[int, INTEGER] = Field(100, ge=1, le=500, description="Maximum number of rows per page.")


class CreateAccount(_GivenLimits):
    """A new account. The service's default replaces a limit that is omitted or null."""

    model_config = example(name="Northwind Traders", credit="12.50")

    name: Name
    credit: Amount | None = Field(
        None, description="The opening credit, such as 12.50, in the service's currency; null: none."
    )
    kind: CreditKind = Field("top_up", description=_KIND)
    expires_at: TimeToCome | None = Field(
        None, description="When the opening grant expires, with a UTC offset; null: never."
    )


class Credit(Body):
    """Funds to add."""

    model_config = example(amount="25.00", memo="Invoice 2026-118")

    amount: Amount
    kind: CreditKind = Field("top_up", description=_KIND)
    memo: Annotated[str, Field(max_length=500, description="Shown in the statement.")] = ""
    expires_at: TimeToCome | None = Field(
        None, description="When the grant expires, with a UTC offset; null: never. Only grants expire."
    )


class Correction(Body):
    """A correction of the top-ups. A positive amount is credited, a negative amount is debited."""

    model_config = example(amount="-5.00", memo="Invoice 2026-118 was booked twice")

    amount: Amount
    memo: Annotated[str, Field(min_length=1, max_length=500, description="What the correction corrects.")]


class TakeBack(Body):
    """The reason for taking back a grant."""

    model_config = example(memo="Granted to the wrong account")

    memo: Annotated[str, Field(min_length=1, max_length=400, description="In the ledger, it begins with `grant N:`.")]


class LimitChanges(_GivenLimits):
    """Limits to change. An omitted limit stays unchanged; null resets a limit to the service's default."""

    model_config = example(rpm=1200, tpm=2_000_000)


@endpoint("POST", "/admin/accounts", "Create an account", success="The new account.", status=201)
async def create_account(admin: AdminServices, body: CreateAccount, audit: Audit, idempotency_key: str) -> Account:
    """Names need not be unique: without an `idempotency-key`, a repeated call creates another account."""
    amount = None if body.credit is None else amount_of(body.credit, "credit")
    expires_at = expiry_of(body.expires_at, admin.now())
    if expires_at is not None and (amount is None or body.kind != "grant"):
        raise errors.invalid_parameters(
            "expires_at needs credit and kind: grant, because only grants expire", param="expires_at"
        )
    limits = body.model_dump(include=set(ACCOUNT_LIMITS), exclude_none=True)
    credit = (amount, body.kind, expires_at)
    command = commands.OpenAccount(body.name, admin.currency, idempotency_key, audit, limits, *credit)
    return await _account_reply(admin, await admin.run(command))


@endpoint("GET", "/admin/accounts", "List accounts", success="A page of accounts, oldest first.", more_errors=(404,))
async def list_accounts(admin: AdminServices, query: AccountsQuery) -> AccountPage:
    found = await admin.run(commands.ListAccounts(query.after, query.limit + 1))
    page = await _account_replies(admin, found[: query.limit])
    return AccountPage(data=page, next=page[-1].id if len(found) > query.limit else None)


@endpoint("GET", ONE, "Show an account", success="The account as it is now.")
async def get_account(admin: AdminServices, account_id: str) -> Account:
    return await _account_reply(admin, await admin.run(commands.GetAccount(account_id)))


@endpoint("POST", f"{ONE}/credit", "Add funds", success="The account with its new balance.", operation_id="credit")
async def add_credit(
    admin: AdminServices, account_id: str, body: Credit, audit: Audit, idempotency_key: str
) -> Account:
    """Without an `idempotency-key`, a repeated call adds the amount again.

    A grant pays for requests that begin before it expires. One hour after that, what is left of it leaves the balance.
    """
    expires_at = expiry_of(body.expires_at, admin.now())
    if expires_at is not None and body.kind != "grant":
        raise errors.invalid_parameters("expires_at: a top-up never expires, only a grant does", param="expires_at")
    amount = amount_of(body.amount, "amount")
    command = commands.AddCredit(account_id, amount, body.kind, idempotency_key, body.memo, expires_at, audit)
    return await _account_reply(admin, await admin.run(command))


@endpoint(
    "POST", f"{ONE}/correct", "Correct a balance", success="The account with its new balance.", operation_id="correct"
)
async def correct_balance(
    admin: AdminServices, account_id: str, body: Correction, audit: Audit, idempotency_key: str
) -> Account:
    """Changes the top-ups, which can't become negative: a larger debit returns 422.

    Without an `idempotency-key`, a repeated call corrects the balance again.
    """
    amount = amount_of(body.amount, "amount", negative=True)
    command = commands.CorrectBalance(account_id, amount, body.memo, idempotency_key, audit)
    return await _account_reply(admin, await admin.run(command))


@endpoint("GET", f"{ONE}/grants", "List grants", success="All grants of the account, oldest first.")
async def list_grants(admin: AdminServices, account_id: str) -> GrantList:
    """The list includes spent and expired grants."""
    now, grants = admin.now(), await admin.run(commands.ListGrants(account_id))
    return GrantList(data=[Grant.from_snapshot(now, grant) for grant in grants])


@endpoint(
    "POST",
    f"{ONE}/grants/{{grant_id}}/take-back",
    "Take back a grant",
    success="The account with its new balance.",
)
async def take_back_grant(
    admin: AdminServices, account_id: str, grant_id: str, body: TakeBack, audit: Audit, idempotency_key: str
) -> Account:
    """Takes what is left of the grant. If nothing is left, the call returns 422.

    A running request that relied on the grant is paid from the rest of the balance.
    """
    if not re.fullmatch("[0-9]{1,18}", grant_id, re.ASCII):
        raise errors.not_found(f"{account_id} has no grant {grant_id}")
    command = commands.TakeBackGrant(account_id, int(grant_id), body.memo, idempotency_key, audit)
    return await _account_reply(admin, await admin.run(command))


@endpoint("PATCH", f"{ONE}/limits", "Change limits", success="The account with its new limits.")
async def set_limits(admin: AdminServices, account_id: str, body: LimitChanges, audit: Audit) -> Account:
    changes = body.model_dump(exclude_unset=True)
    return await _account_reply(admin, await admin.run(commands.SetLimits(account_id, changes, audit)))


@endpoint("POST", f"{ONE}/suspend", "Suspend an account", success="The suspended account.")
async def suspend(admin: AdminServices, account_id: str, audit: Audit) -> Account:
    """New requests with a key of the account are refused. Running requests end normally and are billed."""
    return await _account_reply(admin, await admin.run(commands.SetActive(account_id, False, audit)))


@endpoint("POST", f"{ONE}/resume", "Resume an account", success="The active account.")
async def resume(admin: AdminServices, account_id: str, audit: Audit) -> Account:
    return await _account_reply(admin, await admin.run(commands.SetActive(account_id, True, audit)))


def limits_of(account: AccountSnapshot, status: AccountStatus) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the account's limits and weight, first as set, then with the `tpm` that backends under pressure allow."""
    # The ledger's limits take precedence: the limiter learns of a change a moment later.
    limits = asdict(status.contract.with_own(account.limits))
    return limits, limits | {"tpm": min((limits["tpm"], *(tpm for _, tpm in status.pressed)))}


async def states_of(admin: AdminServices, ids: tuple[str, ...]) -> tuple[AccountStatus, ...]:
    """Returns the limiter's state of these accounts. Raises 503."""
    try:
        states: tuple[AccountStatus, ...] = await admin.limiter.ask(Status(ids))
    except Unavailable:
        raise errors.overloaded("the limiter is restarting: try again", retry_after_s=2) from None
    return states


async def _account_reply(admin: AdminServices, account: AccountSnapshot) -> Account:
    [shown] = await _account_replies(admin, [account])
    return shown


async def _account_replies(admin: AdminServices, accounts: Sequence[AccountSnapshot]) -> list[Account]:
    if not accounts:
        return []
    ids = tuple(account.account_id for account in accounts)
    states = await states_of(admin, ids)
    # Read the ledger after the limiter: the charge of a hold that ends between the two reads is then in the balance and
    # in the usage.
    books = [await admin.run(commands.ShowAccount(account_id)) for account_id in ids]
    return [
        Account.from_usage(admin.now(), account, status, usage)
        for (account, usage), status in zip(books, states, strict=True)
    ]
