"""Endpoints for the audit log, the ledger check and stuck settlements. They require the operator key."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import FLAG, INTEGER, Body, Count, Instant, Query, Reply, utc_text
from serve_app.contracts import commands
from serve_app.contracts.books import Audit, AuditRecord
from serve_app.contracts.money import format_amount, format_price

endpoint = Endpoints("Operator: Service", "operatorKey")


class AuditEntry(Reply):
    """A change or read by an operator, a failed log-in, or a new price."""

    id: int = Field(validation_alias="audit_id")
    at: Instant
    actor: str
    action: str
    subject: str
    account_id: str = Field(description="Empty: the entry is about the whole service.")
    request_id: str | None
    address: str | None
    detail: dict[str, Any] = Field(description="The parameters of the action, or `was` and `is` of what changed.")


class AuditPage(Reply):
    """A page of the audit log, newest first."""

    data: list[AuditEntry]
    next: int | None = Field(description="Pass as `after` to get the next page; null on the last page.")


class Problem(Reply):
    """An inconsistency in the ledger."""

    kind: str
    subject: str
    message: str


class LedgerCheck(Reply):
    """Whether balances, sums and usage agree with the journal."""

    ok: bool = Field(description="The check is complete, and its last steps found no problem.")
    accounts: Count
    entries: Count = Field(description="Number of entries checked, including those of earlier checks.")
    usage_rows: Count = Field(description="Number of usage rows checked, including those of earlier checks.")
    problems: list[Problem] = Field(description="Problems that these steps found.")
    next: str | None = Field(description="Pass as `after` to continue; null: the check is complete.")
    done: float = Field(ge=0, le=1, description="Completed fraction of the check.")


class Stuck(Reply):
    """A settlement that the ledger keeps because it could not settle it."""

    id: str = Field(validation_alias="stuck_id", description="Id of the request.")
    account_id: str
    refusal: str = Field(
        description="`failed`: unexpected error in the ledger. Otherwise the reason why the ledger rejects it: "
        "`account_not_found`, `key_not_found`, `request_of_another_account`, `invalid`."
    )
    reason: str
    tries: Count
    first_at: Instant
    last_at: Instant
    settlement: dict[str, Any] = Field(description="The usage to settle: key, model, tokens, price per token.")


class StuckPage(Reply):
    """A page of stuck settlements, in the order of their ids."""

    data: list[Stuck]
    next: str | None = Field(description="Pass as `after` to get the next page; null on the last page.")


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
    """POST /admin/ledger/stuck/retry. Ids that are not stuck are skipped."""

    ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]], Field(min_length=1, max_length=commands.MAX_RETRIED)
    ]


@endpoint("GET", "/admin/audit", "List the audit log")
async def list_audit(admin: AdminServices, query: AuditQuery) -> AuditPage:
    found = await admin.run(commands.ListAudit(query.account, query.after, query.limit + 1))
    page = [AuditEntry.from_fields(record, detail=_detail(record)) for record in found[: query.limit]]
    return AuditPage(data=page, next=page[-1].id if len(found) > query.limit else None)


class CheckQuery(Query):
    full: Annotated[bool, FLAG] = Field(False, description="Check from the beginning, not from the last checkpoint.")
    after: str | None = Field(None, max_length=300, description="`next` of the previous steps.")


@endpoint("GET", "/admin/ledger/check", "Check the ledger in steps of a few seconds")
async def check_ledger(admin: AdminServices, query: CheckQuery) -> LedgerCheck:
    report = await admin.run(commands.CheckBooks(query.full, query.after))
    return LedgerCheck.from_fields(
        report, ok=report.ok, problems=[Problem.from_fields(one) for one in report.differences]
    )


@endpoint("GET", "/admin/ledger/stuck", "List stuck settlements")
async def list_stuck(admin: AdminServices, query: StuckQuery) -> StuckPage:
    found = await admin.run(commands.ListStuck(query.after, query.limit + 1))
    page = [Stuck.from_fields(one) for one in found[: query.limit]]
    return StuckPage(data=page, next=page[-1].id if len(found) > query.limit else None)


@endpoint("POST", "/admin/ledger/stuck/retry", "Retry stuck settlements")
async def retry_stuck(admin: AdminServices, body: RetryStuck, audit: Audit) -> StuckRetry:
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
