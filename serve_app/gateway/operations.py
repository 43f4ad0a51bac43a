"""Account, key and usage operations behind `/admin` and `/user`, over the ledger's single writer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from serve_app.api import ApiError, errors
from serve_app.gateway.catalogue import Catalogue
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.ports import AccountingPort, BackendPort, BackendUnavailable, LimiterClient
from serve_app.gateway.views import account_view, audit_view, grant_view, key_view, request_view, usage_view
from serve_app.ledger.errors import AccountNotFound, GrantNotFound, KeyNotFound, LedgerError, LedgerUnavailable
from serve_app.ledger.keys import digest, hint, new_key
from serve_app.ledger.messages import (
    AccountSnapshot,
    Audit,
    AuditRecord,
    GrantSnapshot,
    KeySnapshot,
    UsagePage,
    UsageRow,
)
from serve_app.limits.messages import AccountStatus, Status

RETRY_S = 0.5
_SOUGHT = frozenset({"account_id", "key_id", "model", "after"})  # arguments that are compared and never stored
PAGE = 1000  # requests that an export reads at once: all that it ever keeps


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Which requests an export takes; None is any. Unix seconds, of the requests' ends: `since` counts, `until` not."""

    account: str | None = None
    key: str | None = None
    model: str | None = None
    since: float | None = None
    until: float | None = None


class Operations:
    """Each method is one operation; failures are ApiErrors that say what to do."""

    def __init__(
        self,
        accounting: AccountingPort,
        leases: LimiterClient,
        backends: BackendPort,
        catalogue: Catalogue,
        *,
        key_secret: bytes,
        currency: str,
        patience_s: float = 10.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._accounting = accounting
        self._leases = leases
        self._backends = backends
        self.catalogue = catalogue
        self._key_secret = key_secret
        self._currency = currency
        self.now = now  # Unix seconds
        self.patience_s = patience_s  # how long a ledger that is away is waited for

    async def _call(self, operation: str, **arguments: Any) -> Any:
        # PostgreSQL takes no NUL in a text, be it only to look for it. What is looked for instead is nobody's either.
        for name in _SOUGHT & arguments.keys():
            if isinstance(arguments[name], str):
                arguments[name] = arguments[name].replace("\0", "\ufffd")
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

    async def create_account(self, name: str, *, idempotency_key: str, audit: Audit) -> AccountSnapshot:
        """A new account without funds."""
        snapshot: AccountSnapshot = await self._call(
            "create_account", name=name, currency=self._currency, idempotency_key=idempotency_key, audit=audit
        )
        return snapshot

    async def credit(
        self,
        account_id: str,
        amount: int,
        *,
        kind: str,
        memo: str,
        idempotency_key: str,
        audit: Audit,
        expires_at: float | None = None,
    ) -> None:
        """Adds funds: nano-units. Only a grant can expire."""
        await self._call(
            "credit",
            account_id=account_id,
            amount_nano=amount,
            kind=kind,
            memo=memo,
            idempotency_key=idempotency_key,
            expires_at=expires_at,
            audit=audit,
        )

    async def correct(self, account_id: str, amount: int, *, memo: str, idempotency_key: str, audit: Audit) -> None:
        """Gives back, or takes back if negative: nano-units."""
        await self._call(
            "correct",
            account_id=account_id,
            amount_nano=amount,
            memo=memo,
            idempotency_key=idempotency_key,
            audit=audit,
        )

    async def take_back(self, account_id: str, grant_id: int, *, memo: str, idempotency_key: str, audit: Audit) -> None:
        """Takes all that is left of a grant."""
        await self._call(
            "take_back",
            account_id=account_id,
            grant_id=grant_id,
            memo=memo,
            idempotency_key=idempotency_key,
            audit=audit,
        )

    async def grants(self, account_id: str) -> dict[str, Any]:
        """All that an account was given, with what is left of each."""
        grants: list[GrantSnapshot] = await self._call("grants", account_id=account_id)
        return {"data": [grant_view(grant, self.now()) for grant in grants]}

    async def set_limits(self, account_id: str, changes: dict[str, int | None], *, audit: Audit) -> None:
        """Only the limits that are named change; None is the service's default."""
        await self._call("set_limits", account_id=account_id, **changes, audit=audit)

    async def set_active(self, account_id: str, active: bool, *, audit: Audit) -> None:
        """Suspends or resumes an account."""
        await self._call("set_active", account_id=account_id, active=active, audit=audit)

    async def create_key(self, account_id: str, name: str, terms: dict[str, Any], *, audit: Audit) -> dict[str, Any]:
        """The only place where the key itself is ever shown."""
        key = new_key()
        snapshot: KeySnapshot = await self._call(
            "create_key",
            account_id=account_id,
            name=name,
            digest=digest(key, self._key_secret),
            hint=hint(key),
            **terms,
            audit=audit,
        )
        return {**key_view(snapshot, self.now()), "key": key}

    async def update_key(self, key_id: str, changes: dict[str, Any], *, audit: Audit) -> dict[str, Any]:
        """Only the terms that are named change; None takes a bound away."""
        return key_view(await self._call("update_key", key_id=key_id, **changes, audit=audit), self.now())

    async def keys(self, account_id: str) -> dict[str, Any]:
        """All keys of an account, revoked ones too."""
        return {"data": [key_view(key, self.now()) for key in await self._call("list_keys", account_id=account_id)]}

    async def revoke_key(self, key_id: str, *, audit: Audit) -> dict[str, Any]:
        """Revoking twice is harmless."""
        return key_view(await self._call("revoke_key", key_id=key_id, audit=audit), self.now())

    async def requests(self, wanted: RequestFilter, *, limit: int, after: str | None = None) -> dict[str, Any]:
        """One page of billed requests, in a stable order."""
        page: UsagePage = await self._call(
            "export_usage",
            account_id=wanted.account,
            key_id=wanted.key,
            model=wanted.model,
            time_from=wanted.since,
            time_to=wanted.until,
            after=after,
            limit=limit,
        )
        return {"data": [request_view(row) for row in page.rows], "next": page.next}

    async def request_pages(self, wanted: RequestFilter) -> AsyncIterator[list[dict[str, Any]]]:
        """All billed requests, page by page; no more than one page is kept."""
        after: str | None = None
        while True:
            page = await self.requests(wanted, limit=PAGE, after=after)
            yield page["data"]
            after = page["next"]
            if after is None:
                return

    async def audit_log(self, *, account: str | None, limit: int, after: int | None) -> dict[str, Any]:
        """One page of what operators have done, newest first."""
        page: list[AuditRecord] = await self._call("audit_log", account_id=account, after=after, limit=limit + 1)
        more = len(page) > limit
        page = page[:limit]
        return {"data": [audit_view(record) for record in page], "next": page[-1].audit_id if more else None}

    def fingerprint(self, operator_key: str) -> str:
        """Tells one operator key from another in the audit log, and nothing about the key."""
        return digest(operator_key, self._key_secret)[:12]

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
        counts = {"accounts": report.accounts, "entries": report.entries, "usage_rows": report.usage_rows}
        return {"ok": report.ok, **counts, "problems": problems}

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
            usage = rows[0] if rows else UsageRow(0, 0, 0, 0, 0)
            views.append(account_view(account, state, usage, self.now()))
        return views


def _from_ledger(error: LedgerError) -> ApiError:
    if isinstance(error, AccountNotFound | KeyNotFound | GrantNotFound):
        return errors.not_found(str(error))
    return errors.invalid_parameters(str(error))
