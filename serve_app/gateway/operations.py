"""Account, key and usage operations behind `/admin` and `/user`, over the ledger's single writer."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from serve_app.api import ApiError, errors
from serve_app.gateway.catalogue import Catalogue
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.leases import Leases
from serve_app.gateway.ports import AccountingPort, BackendPort, BackendUnavailable
from serve_app.ledger.errors import AccountNotFound, KeyNotFound, LedgerError, LedgerUnavailable
from serve_app.ledger.keys import digest, hint, new_key
from serve_app.ledger.messages import AccountSnapshot, KeySnapshot, UsageRow
from serve_app.ledger.money import format_amount
from serve_app.limits.messages import AccountStatus, Status

RETRY_S = 0.5


class Operations:
    """Each method is one operation; failures are ApiErrors that say what to do."""

    def __init__(
        self,
        accounting: AccountingPort,
        leases: Leases,
        backends: BackendPort,
        catalogue: Catalogue,
        *,
        key_secret: bytes,
        currency: str,
        patience_s: float = 10.0,
    ) -> None:
        self._accounting = accounting
        self._leases = leases
        self._backends = backends
        self.catalogue = catalogue
        self._key_secret = key_secret
        self._currency = currency
        self.patience_s = patience_s  # how long a ledger that is away is waited for

    async def _call(self, operation: str, **arguments: Any) -> Any:
        # Every writing operation carries an idempotency key or sets a value: one that may have happened is repeated.
        try:
            async with asyncio.timeout(self.patience_s):
                while True:
                    try:
                        return await self._accounting.call(operation, arguments)
                    except (Unavailable, LedgerUnavailable):
                        await asyncio.sleep(RETRY_S)
                    except LedgerError as error:
                        raise _from_ledger(error) from None
        except TimeoutError:
            raise errors.overloaded("the ledger is away: try again", retry_after_s=5) from None

    async def account(self, account_id: str) -> AccountSnapshot:
        """Raises 404."""
        snapshot: AccountSnapshot = await self._call("get_account", account_id=account_id)
        return snapshot

    async def account_view(self, account_id: str) -> dict[str, Any]:
        """An account as `/admin` shows it."""
        return (await self._views([await self.account(account_id)]))[0]

    async def accounts(self, *, limit: int, after: str | None) -> dict[str, Any]:
        """One page of accounts."""
        page: list[AccountSnapshot] = await self._call("list_accounts", after=after, limit=limit + 1)
        more = len(page) > limit
        page = page[:limit]
        return {"data": await self._views(page), "next": page[-1].account_id if more else None}

    async def create_account(self, name: str, *, idempotency_key: str) -> AccountSnapshot:
        """A new account without funds."""
        snapshot: AccountSnapshot = await self._call(
            "create_account", name=name, currency=self._currency, idempotency_key=idempotency_key
        )
        return snapshot

    async def credit(self, account_id: str, amount: int, *, kind: str, memo: str, idempotency_key: str) -> None:
        """Adds funds: nano-units."""
        await self._call(
            "credit", account_id=account_id, amount_nano=amount, kind=kind, memo=memo, idempotency_key=idempotency_key
        )

    async def set_limits(self, account_id: str, changes: dict[str, int | None]) -> None:
        """Only the limits that are named change; None is the service's default."""
        await self._call("set_limits", account_id=account_id, **changes)

    async def set_active(self, account_id: str, active: bool) -> None:
        """Suspends or resumes an account."""
        await self._call("set_active", account_id=account_id, active=active)

    async def create_key(self, account_id: str, name: str) -> dict[str, Any]:
        """The only place where the key itself is ever shown."""
        key = new_key()
        snapshot: KeySnapshot = await self._call(
            "create_key", account_id=account_id, name=name, digest=digest(key, self._key_secret), hint=hint(key)
        )
        return {**key_view(snapshot), "key": key}

    async def keys(self, account_id: str) -> dict[str, Any]:
        """All keys of an account, revoked ones too."""
        return {"data": [key_view(key) for key in await self._call("list_keys", account_id=account_id)]}

    async def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Revoking twice is harmless."""
        return key_view(await self._call("revoke_key", key_id=key_id))

    async def usage(
        self,
        *,
        account: str | None = None,
        key: str | None = None,
        model: str | None = None,
        day_from: str | None = None,
        day_to: str | None = None,
        group_by: str = "day",
        allowed: tuple[str, ...] = ("day", "model", "key", "account"),
    ) -> list[dict[str, Any]]:
        """Aggregated usage; days are UTC, both ends included."""
        groups = tuple(part.strip() for part in group_by.split(",") if part.strip())
        for group in groups:
            if group not in allowed:
                raise errors.invalid_parameters(f"group_by takes {', '.join(allowed)}, not {group!r}", param="group_by")
        rows: list[UsageRow] = await self._call(
            "usage", account_id=account, key_id=key, model=model, day_from=day_from, day_to=day_to, group_by=groups
        )
        return [usage_view(row) for row in rows]

    async def check(self) -> dict[str, Any]:
        """Proves the books."""
        report = await self._call("check")
        problems = [{"kind": one.kind, "subject": one.subject, "message": one.message} for one in report.differences]
        return {"ok": report.ok, "entries": report.entries, "usage_rows": report.usage_rows, "problems": problems}

    async def models(self) -> dict[str, Any]:
        """Identifiers, what stands behind them, and prices per million tokens."""
        try:
            status = await self._backends.status()
        except BackendUnavailable:
            raise errors.overloaded("the service is starting: try again", retry_after_s=2) from None
        return {
            "data": [
                {
                    "id": name,
                    "backends": [
                        {"name": backend, "weight": weight, **status.get(backend, {"status": "MISSING", "replicas": 0})}
                        for backend, weight in self.catalogue[name].backends.items()
                    ],
                    "price": self.catalogue[name].price.model_dump(),
                }
                for name in self.catalogue.identifiers
            ]
        }

    async def _views(self, accounts: list[AccountSnapshot]) -> list[dict[str, Any]]:
        if not accounts:
            return []
        try:
            states: tuple[AccountStatus, ...] = await self._leases.ask(
                Status(tuple(account.account_id for account in accounts))
            )
        except Unavailable:
            raise errors.overloaded("the limiter is restarting: try again", retry_after_s=2) from None
        views = []
        for account, state in zip(accounts, states, strict=True):
            rows = await self._call("usage", account_id=account.account_id, group_by=())
            views.append(account_view(account, state, rows[0] if rows else UsageRow(0, 0, 0, 0, 0)))
        return views


def account_view(account: AccountSnapshot, state: AccountStatus, usage: UsageRow) -> dict[str, Any]:
    """Money as decimal strings of the account's currency."""
    own = {"rpm": account.rpm, "tpm": account.tpm, "concurrency": account.concurrency}
    default = {
        "rpm": state.contract.rpm,
        "tpm": state.contract.tpm,
        "concurrency": state.contract.concurrency,
    }
    return {
        "id": account.account_id,
        "name": account.name,
        "status": "active" if account.active else "suspended",
        "currency": account.currency,
        "balance": format_amount(account.balance),
        "granted": format_amount(account.granted),
        "topped_up": format_amount(account.topped_up),
        "held": format_amount(state.held),
        "open_requests": state.open_requests,
        # The ledger's own figures where there are any: the limiter hears of a change a moment later.
        "limits": {name: default[name] if value is None else value for name, value in own.items()},
        "contract": own,
        "usage": {key: value for key, value in usage_view(usage).items() if value is not None},
        "created_at": iso(account.created_at),
    }


def key_view(key: KeySnapshot) -> dict[str, Any]:
    """Everything but the key, which is not stored."""
    return {
        "id": key.key_id,
        "account_id": key.account_id,
        "name": key.name,
        "hint": key.hint,
        "status": "active" if key.active else "revoked",
        "created_at": iso(key.created_at),
        "revoked_at": None if key.revoked_at is None else iso(key.revoked_at),
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


def iso(seconds: float) -> str:
    """ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _from_ledger(error: LedgerError) -> ApiError:
    if isinstance(error, AccountNotFound | KeyNotFound):
        return errors.not_found(str(error))
    return errors.invalid_parameters(str(error))
