"""`/admin`: what the operator key opens. The command line works through it, against a local or a remote service."""

from __future__ import annotations

import re
import uuid

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from serve_app.api import errors
from serve_app.api.headers import bearer
from serve_app.gateway.admin_bodies import (
    Correction,
    CreateAccount,
    CreateKey,
    Credit,
    KeyChanges,
    LimitChanges,
    TakeBack,
    amount_of,
    body_of,
    expiry_of,
    key_terms,
    page_of,
)
from serve_app.gateway.admin_usage import usage_router
from serve_app.gateway.identity import Authenticator
from serve_app.gateway.operations import Operations
from serve_app.ledger.messages import Audit

MOST_ACCOUNTS = 500  # on one page
MOST_RECORDS = 500  # of the audit log, on one page
MOST_KEY = 128  # characters of an idempotency key; the ledger takes 200, and an opening credit derives its own from it
CHANGE_KEY = re.compile(rf"[!-~](?:[ -~]{{0,{MOST_KEY - 2}}}[!-~])?", re.ASCII)
OPERATOR = re.compile(r"[!-~](?:[ -~]{0,98}[!-~])?", re.ASCII)


def admin_router(authenticator: Authenticator, operations: Operations) -> APIRouter:
    """All operator endpoints. Each change carries who asked for it into the ledger's audit log."""
    router = APIRouter(prefix="/admin")
    router.include_router(usage_router(authenticator, operations))

    def idempotency_key(request: Request) -> str:
        key = request.headers.get("idempotency-key")
        if key is None:
            return uuid.uuid4().hex
        if not CHANGE_KEY.fullmatch(key):
            raise errors.invalid_parameters(
                f"idempotency-key must be 1 to {MOST_KEY} printable ASCII characters", param="idempotency-key"
            )
        return key

    def operator(request: Request) -> Audit:
        """Lets the operator pass, and says who it is: what they call themselves, and which key they hold."""
        authenticator.operator(request)
        name = request.headers.get("x-operator", "").strip()
        if name and not OPERATOR.fullmatch(name):
            raise errors.invalid_parameters(
                "x-operator must be 1 to 100 printable ASCII characters", param="x-operator"
            )
        key = f"key:{operations.fingerprint(bearer(request.headers.get('authorization')))}"
        return Audit(
            actor=f"{name} {key}" if name else key,
            request_id=getattr(request.state, "request_id", None),
            address=authenticator.address(request),
        )

    @router.post("/accounts")
    async def create_account(request: Request) -> JSONResponse:
        audit = operator(request)
        body = await body_of(request, CreateAccount)
        amount = None if body.credit is None else amount_of(body.credit, "credit")
        expires_at = expiry_of(body.expires_at, operations.now())
        if expires_at is not None and (amount is None or body.kind != "grant"):
            raise errors.invalid_parameters(
                "expires_at is for an opening grant: only grants expire", param="expires_at"
            )
        key = idempotency_key(request)
        account = await operations.create_account(body.name, idempotency_key=key, audit=audit)
        limits = body.model_dump(include=set(LimitChanges.model_fields), exclude_none=True)
        if limits:
            await operations.set_limits(account.account_id, limits, audit=audit)
        if amount is not None:
            await operations.credit(
                account.account_id,
                amount,
                kind=body.kind,
                memo="opening credit",
                idempotency_key=f"{key}:credit",
                expires_at=expires_at,
                audit=audit,
            )
        return JSONResponse(await operations.account_view(account.account_id), status_code=201)

    @router.get("/accounts")
    async def list_accounts(request: Request) -> JSONResponse:
        authenticator.operator(request)
        limit = page_of(request, default=100, most=MOST_ACCOUNTS)
        return JSONResponse(await operations.accounts(limit=limit, after=request.query_params.get("after")))

    @router.get("/accounts/{account_id}")
    async def show_account(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/credit")
    async def credit(request: Request, account_id: str) -> JSONResponse:
        audit = operator(request)
        body = await body_of(request, Credit)
        expires_at = expiry_of(body.expires_at, operations.now())
        if expires_at is not None and body.kind != "grant":
            raise errors.invalid_parameters("expires_at: a top-up never expires, only a grant does", param="expires_at")
        await operations.credit(
            account_id,
            amount_of(body.amount, "amount"),
            kind=body.kind,
            memo=body.memo,
            idempotency_key=idempotency_key(request),
            expires_at=expires_at,
            audit=audit,
        )
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/correct")
    async def correct(request: Request, account_id: str) -> JSONResponse:
        audit = operator(request)
        body = await body_of(request, Correction)
        amount = amount_of(body.amount, "amount", negative=True)
        await operations.correct(
            account_id, amount, memo=body.memo, idempotency_key=idempotency_key(request), audit=audit
        )
        return JSONResponse(await operations.account_view(account_id))

    @router.get("/accounts/{account_id}/grants")
    async def grants(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.grants(account_id))

    @router.post("/accounts/{account_id}/grants/{grant_id}/take-back")
    async def take_back(request: Request, account_id: str, grant_id: str) -> JSONResponse:
        audit = operator(request)
        body = await body_of(request, TakeBack)
        if not re.fullmatch("[0-9]{1,18}", grant_id, re.ASCII):
            raise errors.not_found(f"{account_id} has no grant {grant_id}")
        await operations.take_back(
            account_id, int(grant_id), memo=body.memo, idempotency_key=idempotency_key(request), audit=audit
        )
        return JSONResponse(await operations.account_view(account_id))

    @router.patch("/accounts/{account_id}/limits")
    async def limits(request: Request, account_id: str) -> JSONResponse:
        audit = operator(request)
        body = await body_of(request, LimitChanges)
        await operations.set_limits(account_id, body.model_dump(exclude_unset=True), audit=audit)
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/suspend")
    async def suspend(request: Request, account_id: str) -> JSONResponse:
        audit = operator(request)
        await operations.set_active(account_id, False, audit=audit)
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/resume")
    async def resume(request: Request, account_id: str) -> JSONResponse:
        audit = operator(request)
        await operations.set_active(account_id, True, audit=audit)
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/keys")
    async def create_key(request: Request, account_id: str) -> JSONResponse:
        audit = operator(request)
        body = await body_of(request, CreateKey)
        terms = key_terms(body, operations.catalogue.identifiers, operations.now())
        terms.pop("name", None)
        return JSONResponse(await operations.create_key(account_id, body.name, terms, audit=audit), status_code=201)

    @router.get("/accounts/{account_id}/keys")
    async def list_keys(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.keys(account_id))

    @router.patch("/keys/{key_id}")
    async def update_key(request: Request, key_id: str) -> JSONResponse:
        audit = operator(request)
        body = await body_of(request, KeyChanges)
        changes = key_terms(body, operations.catalogue.identifiers, operations.now())
        return JSONResponse(await operations.update_key(key_id, changes, audit=audit))

    @router.delete("/keys/{key_id}")
    async def revoke_key(request: Request, key_id: str) -> JSONResponse:
        audit = operator(request)
        return JSONResponse(await operations.revoke_key(key_id, audit=audit))

    @router.get("/audit")
    async def audit_log(request: Request) -> JSONResponse:
        authenticator.operator(request)
        limit = page_of(request, default=100, most=MOST_RECORDS)
        after = request.query_params.get("after")
        if after is not None and not re.fullmatch("[0-9]{1,18}", after, re.ASCII):
            raise errors.invalid_parameters("after must be the id of an audit record", param="after")
        return JSONResponse(
            await operations.audit_log(
                account=request.query_params.get("account"), limit=limit, after=None if after is None else int(after)
            )
        )

    @router.get("/ledger/check")
    async def check(request: Request) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.check())

    @router.get("/models")
    async def models(request: Request) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.models())

    return router
