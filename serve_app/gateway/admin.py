"""`/admin`: what the operator key opens. The command line works through it, against a local or a remote service."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_app.api import errors
from serve_app.gateway.identity import Authenticator
from serve_app.gateway.operations import Operations
from serve_app.gateway.replies import read_body
from serve_app.ledger.errors import LedgerError
from serve_app.ledger.money import parse_amount

MOST_BYTES = 64 * 1024
MOST_ACCOUNTS = 500  # on one page
MOST_KEY = 128  # characters of an idempotency key; the ledger takes 200, and an opening credit derives its own from it
Limit = Annotated[int, Field(ge=1, le=10**12)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CreateAccount(_Body):
    """POST /admin/accounts."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    credit: str | None = None
    kind: Literal["top_up", "grant"] = "top_up"
    rpm: Limit | None = None
    tpm: Limit | None = None
    concurrency: Limit | None = None


class Credit(_Body):
    """POST /admin/accounts/{id}/credit."""

    amount: str
    kind: Literal["top_up", "grant"] = "top_up"
    memo: Annotated[str, Field(max_length=500)] = ""


class LimitChanges(_Body):
    """PATCH /admin/accounts/{id}/limits; null is the service's default."""

    rpm: Limit | None = None
    tpm: Limit | None = None
    concurrency: Limit | None = None


class CreateKey(_Body):
    """POST /admin/accounts/{id}/keys."""

    name: Annotated[str, Field(min_length=1, max_length=100)] = "key"


Body = TypeVar("Body", bound=_Body)


async def body_of(request: Request, kind: type[Body]) -> Body:
    """The request's body. Raises 400 for what is no such object, 422 for a value out of range."""
    raw = await read_body(request, MOST_BYTES)
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, problem["loc"]))
        text = f"{param}: {problem['msg']}" if param else problem["msg"]
        if problem["type"] in ("missing", "json_invalid", "extra_forbidden") or problem["type"].endswith("_type"):
            raise errors.invalid_format(text, param=param or None) from None
        raise errors.invalid_parameters(text, param=param or None) from None


def amount_of(text: str, param: str) -> int:
    """A positive decimal amount in nano-units. Raises 422."""
    try:
        amount = parse_amount(text)
    except LedgerError as error:
        raise errors.invalid_parameters(str(error), param=param) from None
    if amount <= 0:
        raise errors.invalid_parameters(f"{param} must be above 0", param=param)
    return amount


def admin_router(authenticator: Authenticator, operations: Operations) -> APIRouter:
    """All operator endpoints."""
    router = APIRouter(prefix="/admin")

    def idempotency_key(request: Request) -> str:
        key = request.headers.get("idempotency-key") or uuid.uuid4().hex
        if len(key) > MOST_KEY:
            raise errors.invalid_parameters(f"idempotency-key must have at most {MOST_KEY} characters")
        return key

    @router.post("/accounts")
    async def create_account(request: Request) -> JSONResponse:
        authenticator.operator(request)
        body = await body_of(request, CreateAccount)
        amount = None if body.credit is None else amount_of(body.credit, "credit")
        key = idempotency_key(request)
        account = await operations.create_account(body.name, idempotency_key=key)
        limits = body.model_dump(include={"rpm", "tpm", "concurrency"}, exclude_none=True)
        if limits:
            await operations.set_limits(account.account_id, limits)
        if amount is not None:
            await operations.credit(
                account.account_id, amount, kind=body.kind, memo="opening credit", idempotency_key=f"{key}:credit"
            )
        return JSONResponse(await operations.account_view(account.account_id), status_code=201)

    @router.get("/accounts")
    async def list_accounts(request: Request) -> JSONResponse:
        authenticator.operator(request)
        limit = request.query_params.get("limit", "100")
        if not limit.isdecimal() or len(limit) > 4 or not 1 <= int(limit) <= MOST_ACCOUNTS:
            raise errors.invalid_parameters(f"limit must be a whole number from 1 to {MOST_ACCOUNTS}", param="limit")
        return JSONResponse(await operations.accounts(limit=int(limit), after=request.query_params.get("after")))

    @router.get("/accounts/{account_id}")
    async def show_account(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/credit")
    async def credit(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        body = await body_of(request, Credit)
        await operations.credit(
            account_id,
            amount_of(body.amount, "amount"),
            kind=body.kind,
            memo=body.memo,
            idempotency_key=idempotency_key(request),
        )
        return JSONResponse(await operations.account_view(account_id))

    @router.patch("/accounts/{account_id}/limits")
    async def limits(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        body = await body_of(request, LimitChanges)
        await operations.set_limits(account_id, body.model_dump(exclude_unset=True))
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/suspend")
    async def suspend(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        await operations.set_active(account_id, False)
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/resume")
    async def resume(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        await operations.set_active(account_id, True)
        return JSONResponse(await operations.account_view(account_id))

    @router.post("/accounts/{account_id}/keys")
    async def create_key(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        body = await body_of(request, CreateKey)
        return JSONResponse(await operations.create_key(account_id, body.name), status_code=201)

    @router.get("/accounts/{account_id}/keys")
    async def list_keys(request: Request, account_id: str) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.keys(account_id))

    @router.delete("/keys/{key_id}")
    async def revoke_key(request: Request, key_id: str) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.revoke_key(key_id))

    @router.get("/usage")
    async def usage(request: Request) -> JSONResponse:
        authenticator.operator(request)
        query: Any = request.query_params
        rows = await operations.usage(
            account=query.get("account"),
            key=query.get("key"),
            model=query.get("model"),
            day_from=query.get("from"),
            day_to=query.get("to"),
            group_by=query.get("group_by", "day"),
        )
        return JSONResponse({"data": rows})

    @router.get("/ledger/check")
    async def check(request: Request) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.check())

    @router.get("/models")
    async def models(request: Request) -> JSONResponse:
        authenticator.operator(request)
        return JSONResponse(await operations.models())

    return router
