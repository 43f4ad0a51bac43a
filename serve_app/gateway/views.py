"""What `/admin` and `/user` show: ledger messages as JSON, money as decimal strings, times in ISO 8601 UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from serve_app.ledger.messages import (
    AccountSnapshot,
    AuditRecord,
    GrantSnapshot,
    KeySnapshot,
    UsageRecord,
    UsageRow,
)
from serve_app.ledger.money import format_amount, format_price
from serve_app.limits.messages import AccountStatus

LIMITS = ("rpm", "tpm", "concurrency")


def account_view(account: AccountSnapshot, state: AccountStatus, usage: UsageRow, now: float) -> dict[str, Any]:
    """An account. `contract` is its own (null: the service's default), `effective` what pressure leaves of `limits`.

    `pressure` names the backends under pressure and what each of them leaves.
    """
    own = {name: getattr(account, name) for name in (*LIMITS, "weight")}
    default = {name: getattr(state.contract, name) for name in (*LIMITS, "weight")}
    # The ledger's own figures where there are any: the limiter hears of a change a moment later.
    limits = {name: default[name] if value is None else value for name, value in own.items()}
    weight = limits.pop("weight")
    return {
        "id": account.account_id,
        "name": account.name,
        "status": "active" if account.active else "suspended",
        "currency": account.currency,
        "balance": format_amount(account.balance),
        "available": format_amount(account.available(now)),
        "granted": format_amount(account.granted),
        "topped_up": format_amount(account.topped_up),
        "expiring": [
            {"expires_at": iso(expires_at), "left": format_amount(left)}
            for expires_at, left in account.expiring
            if expires_at > now
        ],
        "held": format_amount(state.held),
        "open_requests": state.open_requests,
        "weight": weight,
        "limits": limits,
        "effective": limits | {"tpm": min((limits["tpm"], *(tpm for _, tpm in state.pressed)))},
        "pressure": [{"backend": backend, "tpm": tpm} for backend, tpm in state.pressed],
        "contract": own,
        "usage": {key: value for key, value in usage_view(usage).items() if value is not None},
        "created_at": iso(account.created_at),
    }


def key_view(key: KeySnapshot, now: float) -> dict[str, Any]:
    """Everything but the key, which is not stored. Null stands for no bound of the key's own."""
    spent, renews_at = None, None
    if key.budget_period is not None:
        period, ends = budget_period(key.budget_period, now)
        spent = format_amount(key.spent if key.spent_period == period else 0)
        renews_at = iso(ends)
    return {
        "id": key.key_id,
        "account_id": key.account_id,
        "name": key.name,
        "hint": key.hint,
        "status": key_status(key, now),
        "models": None if key.models is None else list(key.models),
        "limits": {name: getattr(key, name) for name in LIMITS},
        "budget": None if key.budget is None else format_amount(key.budget),
        "budget_period": key.budget_period,
        "spent": spent,
        "renews_at": renews_at,
        "expires_at": None if key.expires_at is None else iso(key.expires_at),
        "created_at": iso(key.created_at),
        "revoked_at": None if key.revoked_at is None else iso(key.revoked_at),
    }


def key_status(key: KeySnapshot, now: float) -> Literal["active", "revoked", "expired"]:
    """A key that was revoked stays so, whatever its expiry."""
    if not key.active:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"


def budget_period(period: Literal["day", "month"], now: float) -> tuple[str, float]:
    """Name of the UTC day or month that `now` (Unix seconds) lies in, and when it ends."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return today.strftime("%Y-%m-%d"), (today + timedelta(days=1)).timestamp()
    first = today.replace(day=1)
    return first.strftime("%Y-%m"), (first + timedelta(days=32)).replace(day=1).timestamp()


def grant_view(grant: GrantSnapshot, now: float) -> dict[str, Any]:
    """One grant; `left` is what was not spent of it yet."""
    expired = grant.expires_at is not None and grant.expires_at <= now
    return {
        "id": grant.grant_id,
        "status": "expired" if expired else "spent" if not grant.left else "open",
        "amount": format_amount(grant.amount),
        "left": format_amount(grant.left),
        "created_at": iso(grant.created_at),
        "expires_at": None if grant.expires_at is None else iso(grant.expires_at),
        "memo": grant.memo,
    }


def usage_view(row: UsageRow) -> dict[str, Any]:
    """One group of usage."""
    return {
        "day": row.day,
        "model": row.model,
        "account_id": row.account_id,
        "key_id": row.key_id,
        "requests": row.requests,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens,
        "total_tokens": row.prompt_tokens + row.completion_tokens,
        "charged": format_amount(row.charged),
    }


def request_view(row: UsageRecord) -> dict[str, Any]:
    """One request, as exports show it."""
    return {
        "request_id": row.request_id,
        "account_id": row.account_id,
        "key_id": row.key_id,
        "model": row.model,
        "backend": row.backend,
        "outcome": str(row.outcome),
        "started_at": iso(row.started_at, "milliseconds"),
        "finished_at": iso(row.finished_at, "milliseconds"),
        "settled_at": iso(row.settled_at, "milliseconds"),
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens,
        "total_tokens": row.prompt_tokens + row.completion_tokens,
        "price_input": format_price(row.price.input),
        "price_cached_input": format_price(row.price.cached_input),
        "price_output": format_price(row.price.output),
        "charged": format_amount(row.charged),
        "uncollected": format_amount(row.uncollected),
    }


def audit_view(record: AuditRecord) -> dict[str, Any]:
    """One operator action."""
    return {
        "id": record.audit_id,
        "at": iso(record.at, "milliseconds"),
        "actor": record.actor,
        "action": record.action,
        "subject": record.subject,
        "account_id": record.account_id,
        "request_id": record.request_id,
        "address": record.address,
        "detail": {name: _shown(name, value) for name, value in record.detail.items() if value is not None},
    }


def _shown(name: str, value: Any) -> Any:
    """A field of an audit record: the ledger keeps money in nano-units and times in Unix seconds."""
    if isinstance(value, dict) and set(value) == {"was", "is"}:
        return {side: _shown(name, one) for side, one in value.items()}
    if name in ("amount", "budget") and isinstance(value, int):
        return format_amount(value)
    return iso(value) if name == "expires_at" and isinstance(value, int | float) else value


def iso(seconds: float, precision: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=precision).replace("+00:00", "Z")
