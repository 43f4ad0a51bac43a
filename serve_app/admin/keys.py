"""Endpoints for API keys and their limits. They require the operator key."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import (
    AccountId,
    Amount,
    Body,
    KeyId,
    Money,
    Name,
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
from serve_app.contracts.books import Audit, KeySnapshot
from serve_app.contracts.key_format import digest, hint, new_key
from serve_app.contracts.limits import KEY_LIMITS
from serve_app.contracts.periods import BudgetPeriod, period_at

endpoint = Endpoints("Operator: Keys", "operatorKey")

_Identifier = Annotated[str, Field(min_length=1, max_length=100)]
_Tag = Annotated[str, Field(min_length=1, max_length=40, description="Printable characters without commas.")]
_Network = Annotated[str, Field(min_length=1, max_length=50, description="For example 203.0.113.7 or 10.0.0.0/8.")]
_GivenLimits: Any = limits_in(Body, KEY_LIMITS)
_OwnLimits: Any = limits_in(Reply, KEY_LIMITS)


class OwnLimits(_OwnLimits):
    """A key's own limits; null: no limit."""


class Key(Reply):
    """An API key without the key itself, which is not stored. null: no restriction."""

    id: KeyId = Field(validation_alias="key_id")
    account_id: AccountId
    name: str = Field(examples=["production"])
    hint: str = Field(description="The readable start and end of the key.", examples=["sk-4fGh…x9Qz"])
    status: Literal["active", "revoked", "expired"]
    models: list[str] | None = Field(description="Models that the key may call; null: any.", examples=[["svc-chat"]])
    tags: list[str] | None = Field(
        description="Labels by which usage can be summed; null: none.", examples=[["website"]]
    )
    addresses: list[str] | None = Field(
        description="Networks from which the key may be used; null: any.", examples=[["203.0.113.0/24"]]
    )
    limits: OwnLimits
    budget: Money | None = Field(
        description="The most that the key may spend in a period; null: no budget.", examples=["50.00"]
    )
    budget_period: BudgetPeriod | None = Field(description="A day or a month in UTC.", examples=["month"])
    spent: Money | None = Field(description="Amount spent in the current period; null without a budget.")
    renews_at: Time | None = Field(
        description="When the next period of the budget begins; null without a budget.",
        examples=["2026-12-01T00:00:00Z"],
    )
    expires_at: Time | None = Field(description="null: never.", examples=["2027-11-30T12:00:00Z"])
    created_at: Time
    revoked_at: Time | None = Field(description="null: not revoked.", examples=[None])

    @classmethod
    def from_snapshot(cls, now: float, snapshot: KeySnapshot, /, **more: Any) -> Self:
        expired = snapshot.expires_at is not None and snapshot.expires_at <= now
        period = None if snapshot.budget_period is None else period_at(snapshot.budget_period, now)
        return cls.from_fields(
            snapshot,
            status="revoked" if not snapshot.active else "expired" if expired else "active",
            limits={name: snapshot.limits.get(name) for name in KEY_LIMITS},
            spent=None if period is None else snapshot.spent if snapshot.spent_period == period.name else 0,
            renews_at=None if period is None else period.ends,
            **more,
        )


class NewKey(Key):
    """A newly created key."""

    key: str = Field(
        description="The key itself, shown only once.",
        examples=["sk-4fGhT7bQm2XvLr9KcWd5ZsNp8YjEa3HuBt6RkGq1FnVo0x9Qz"],
    )


class KeyList(Reply):
    """All keys of an account, including revoked keys."""

    data: list[Key]


class KeyTerms(_GivenLimits):
    """A key's permissions and limits; null: no restriction."""

    models: Annotated[list[_Identifier], Field(min_length=1, max_length=100)] | None = Field(
        None, description="Models that the key may call. Each must be served now."
    )
    tags: Annotated[list[_Tag], Field(min_length=1, max_length=10)] | None = Field(
        None, description="Labels by which usage can be summed."
    )
    addresses: Annotated[list[_Network], Field(min_length=1, max_length=50)] | None = Field(
        None, description="Addresses and networks from which the key may be used."
    )
    budget: Amount | None = Field(
        None,
        description="The most that the key may spend in a period, such as 12.50, in the service's currency. It needs "
        "`budget_period`.",
    )
    budget_period: BudgetPeriod | None = Field(None, description="A day or a month in UTC.")
    expires_at: TimeToCome | None = Field(None, description="When the key stops working, with a UTC offset.")


class CreateKey(KeyTerms):
    """A new key."""

    model_config = example(name="production", models=["svc-chat"], budget="50.00", budget_period="month")

    name: Name = "key"


class KeyChanges(KeyTerms):
    """Changes of a key. Omitted fields stay unchanged; null removes a restriction."""

    model_config = example(rpm=120, budget="100.00", budget_period="month")

    name: Name | None = None


@endpoint(
    "POST",
    "/admin/accounts/{account_id}/keys",
    "Create a key",
    success="The new key. Its text is in no later reply.",
    status=201,
)
async def create_key(admin: AdminServices, account_id: str, body: CreateKey, audit: Audit) -> NewKey:
    """The account pays for all requests with the key. A call that is repeated creates another key.

    The limits of the account apply as well. An account has at most 1,000 active keys.
    """
    terms = terms_of(admin, body)
    terms.pop("name", None)
    key = new_key()
    command = commands.CreateKey(account_id, body.name, digest(key), hint(key), terms, audit)
    return NewKey.from_snapshot(admin.now(), await admin.run(command), key=key)


@endpoint(
    "GET",
    "/admin/accounts/{account_id}/keys",
    "List an account's keys",
    success="All keys of the account, oldest first.",
    recorded="read_keys",
)
async def list_keys(admin: AdminServices, account_id: str) -> KeyList:
    """The list includes revoked and expired keys. The audit log records the call."""
    keys = await admin.run(commands.ListKeys(account_id))
    return KeyList(data=[Key.from_snapshot(admin.now(), key) for key in keys])


@endpoint("PATCH", "/admin/keys/{key_id}", "Change a key's restrictions", success="The changed key.")
async def update_key(admin: AdminServices, key_id: str, body: KeyChanges, audit: Audit) -> Key:
    """A new budget also counts what the key has spent in the current period.

    null for `budget` removes its period as well.
    """
    return Key.from_snapshot(admin.now(), await admin.run(commands.UpdateKey(key_id, terms_of(admin, body), audit)))


@endpoint("DELETE", "/admin/keys/{key_id}", "Revoke a key", success="The revoked key.")
async def revoke_key(admin: AdminServices, key_id: str, audit: Audit) -> Key:
    """A revoked key stays revoked. Requests with it are refused within a second. A repeated call changes nothing."""
    return Key.from_snapshot(admin.now(), await admin.run(commands.RevokeKey(key_id, audit)))


def terms_of(admin: AdminServices, body: KeyTerms) -> dict[str, Any]:
    """Returns the terms that the body sets, in the ledger's form. Raises 422.

    Each model must be served, because a key for a misspelt model would be useless.
    """
    given: dict[str, Any] = body.model_dump(exclude_unset=True)
    if given.get("models") is not None:
        served = admin.catalogue().identifiers
        unknown = [name for name in given["models"] if name not in served]
        if unknown:
            raise errors.invalid_parameters(
                f"models: no model {unknown[0]!r}; use one of {', '.join(served)}", param="models"
            )
        given["models"] = tuple(dict.fromkeys(given["models"]))
    if given.get("budget") is not None:
        given["budget"] = amount_of(given["budget"], "budget")
    if "expires_at" in given:
        given["expires_at"] = expiry_of(given["expires_at"], admin.now())
    return given
