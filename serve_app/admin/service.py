"""Endpoints for the audit log, the ledger check and stuck settlements. They require the operator key."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import (
    FLAG,
    INTEGER,
    AccountId,
    Body,
    Count,
    Instant,
    Next,
    Query,
    Reply,
    RequestId,
    example,
    utc_text,
)
from serve_app.contracts import commands
from serve_app.contracts.books import Audit, AuditRecord
from serve_app.contracts.money import format_amount, format_price

endpoint = Endpoints("Operator: Service", "operatorKey")


class AuditEntry(Reply):
    """A change or read by an operator, a failed log-in, or a new price."""

    id: int = Field(validation_alias="audit_id", examples=[5120])
    at: Instant
    actor: str = Field(
        description="Who did it: `mk:` and a management key's id, or the name in `x-operator` and the operator key's "
        "fingerprint, or a person's e-mail address.",
        examples=["kim key:9f86d081884c"],
    )
    action: str = Field(examples=["credit"])
    subject: str = Field(
        description="What the action was about: the id or name of an account, a key, a person, a model and so on.",
        examples=["acct_7k2m9x4q1v8d3n6p5w0r"],
    )
    account_id: AccountId = Field(description="Empty: the entry is about the whole service.")
    request_id: str | None = Field(
        description="`x-request-id` of the call; null: none.", examples=["0b8f3c5e2d7a4196b1e0c4d8a9f27635"]
    )
    address: str | None = Field(description="IP address of the caller; null: unknown.", examples=["203.0.113.7"])
    detail: dict[str, Any] = Field(
        description="The parameters of the action, or `was` and `is` of what changed.",
        examples=[{"amount": "25.00", "kind": "top_up", "memo": "Invoice 2026-118"}],
    )


class AuditPage(Reply):
    """A page of the audit log, newest first."""

    data: list[AuditEntry]
    next: int | None = Field(
        description="Pass as `after` to get the next page; null on the last page.", examples=[None]
    )


class Problem(Reply):
    """An inconsistency in the ledger."""

    kind: str = Field(examples=["balance"])
    subject: str = Field(description="Id of the object to inspect.", examples=["acct_7k2m9x4q1v8d3n6p5w0r"])
    message: str = Field(examples=["the balance is 12.50, the journal has 12.40"])


class LedgerCheck(Reply):
    """Whether balances, sums and usage agree with the journal."""

    ok: bool = Field(description="The check is complete, and its last steps found no problem.")
    accounts: Count = Field(description="Number of accounts checked.", examples=[12])
    entries: Count = Field(description="Number of entries checked, including those of earlier checks.", examples=[4210])
    usage_rows: Count = Field(
        description="Number of usage rows checked, including those of earlier checks.", examples=[98_304]
    )
    problems: list[Problem] = Field(description="Problems that these steps found.", examples=[[]])
    next: str | None = Field(description="Pass as `after` to continue; null: the check is complete.", examples=[None])
    done: float = Field(ge=0, le=1, description="Completed fraction of the check.", examples=[1.0])


class Stuck(Reply):
    """A settlement that the ledger keeps because it could not settle it."""

    id: RequestId = Field(validation_alias="stuck_id", description="Id of the request.")
    account_id: AccountId
    refusal: str = Field(
        description="`failed`: unexpected error in the ledger. Otherwise the reason why the ledger rejects it: "
        "`account_not_found`, `key_not_found`, `request_of_another_account`, `invalid`.",
        examples=["key_not_found"],
    )
    reason: str = Field(description="The ledger's message.", examples=["no key 'key_3h8t5c0n7z2b9g4m6s1x'"])
    tries: Count = Field(examples=[3])
    first_at: Instant = Field(description="When it first got stuck, in UTC.")
    last_at: Instant = Field(description="When it was last tried, in UTC.", examples=["2026-11-30T12:05:00.000Z"])
    settlement: dict[str, Any] = Field(
        description="The usage to settle: key, model, tokens, price in nano-units (1e-9 of the currency) per token.",
        examples=[
            {
                "key_id": "key_3h8t5c0n7z2b9g4m6s1x",
                "model": "svc-chat",
                "prompt_tokens": 1200,
                "cached_tokens": 200,
                "completion_tokens": 340,
                "price": {"input": 270, "cached_input": 70, "output": 1100},
                "outcome": "completed",
            }
        ],
    )


class StuckPage(Reply):
    """A page of stuck settlements, in the order of their ids."""

    data: list[Stuck]
    next: Next


class StuckRetry(Reply):
    """Settlements that are still stuck after the retry."""

    data: list[Stuck]


_RecordId = Annotated[int, Field(ge=0, le=10**18 - 1), INTEGER]


class AuditQuery(Query):
    account: str | None = Field(None, description="Only this account.")
    after: _RecordId | None = Field(None, description="`next` of the previous page.")
    limit: Annotated[int, INTEGER] = Field(100, ge=1, le=500, description="Maximum number of rows per page.")


class StuckQuery(Query):
    after: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="`next` of the previous page."
    )
    limit: Annotated[int, INTEGER] = Field(100, ge=1, le=200, description="Maximum number of rows per page.")


class RetryStuck(Body):
    """The settlements to retry. Ids that are not stuck are skipped."""

    model_config = example(ids=["chatcmpl-5d41402abc4b2a76b9719d911017c592"])

    ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]], Field(min_length=1, max_length=commands.MAX_RETRIED)
    ]


@endpoint("GET", "/admin/audit", "List the audit log", success="A page of entries, newest first.")
async def list_audit(admin: AdminServices, query: AuditQuery) -> AuditPage:
    """The log has changes and reads by operators, failed log-ins, and new prices."""
    found = await admin.run(commands.ListAudit(query.account, query.after, query.limit + 1))
    page = [AuditEntry.from_fields(record, detail=_detail(record)) for record in found[: query.limit]]
    return AuditPage(data=page, next=page[-1].id if len(found) > query.limit else None)


class CheckQuery(Query):
    full: Annotated[bool, FLAG] = Field(False, description="Check from the beginning, not from the last checkpoint.")
    after: str | None = Field(None, max_length=300, description="`next` of the previous steps.")


@endpoint(
    "GET",
    "/admin/ledger/check",
    "Check the ledger in steps of a few seconds",
    success="What these steps of the check found.",
)
async def check_ledger(admin: AdminServices, query: CheckQuery) -> LedgerCheck:
    """Repeat the call with `next` as `after` until `next` is null. The service may run meanwhile.

    If a call returns 422 because another check or an archive has come between, start again.
    """
    report = await admin.run(commands.CheckBooks(query.full, query.after))
    return LedgerCheck.from_fields(
        report, ok=report.ok, problems=[Problem.from_fields(one) for one in report.differences]
    )


@endpoint(
    "GET",
    "/admin/ledger/stuck",
    "List stuck settlements",
    success="A page of settlements, in the order of their ids.",
)
async def list_stuck(admin: AdminServices, query: StuckQuery) -> StuckPage:
    """A stuck settlement is the usage of a request that the ledger could not bill."""
    found = await admin.run(commands.ListStuck(query.after, query.limit + 1))
    page = [Stuck.from_fields(one) for one in found[: query.limit]]
    return StuckPage(data=page, next=page[-1].id if len(found) > query.limit else None)


@endpoint(
    "POST",
    "/admin/ledger/stuck/retry",
    "Retry stuck settlements",
    success="The settlements that are still stuck; empty if all are billed now.",
)
async def retry_stuck(admin: AdminServices, body: RetryStuck, audit: Audit) -> StuckRetry:
    """A settlement that succeeds is billed to its account, once. It is harmless to repeat the call."""
    found = await admin.run(commands.RetryStuck(tuple(body.ids), audit))
    return StuckRetry(data=[Stuck.from_fields(one) for one in found])


def _detail(record: AuditRecord) -> dict[str, Any]:
    return {name: _shown_value(name, value) for name, value in record.detail.items() if value is not None}


def _shown_value(name: str, value: Any) -> Any:
    """Formats a field of an audit record: the ledger keeps money in nano-units and times in Unix seconds."""
    if isinstance(value, dict) and set(value) == {"was", "is"}:
        return {side: _shown_value(name, one) for side, one in value.items()}
    if name in ("amount", "budget") and isinstance(value, int):
        return format_amount(value)
    if name in ("input", "cached_input", "output") and isinstance(value, int):
        return format_price(value)
    return utc_text(value) if name in ("expires_at", "effective_at") and isinstance(value, int | float) else value
