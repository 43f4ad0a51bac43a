"""The operations that the operator's key opens."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from serve_app.gateway import admin_bodies
from serve_app.gateway.admin import MOST_ACCOUNTS, MOST_RECORDS
from serve_app.gateway.openapi.public_paths import path_parameter, query_parameter, usage_parameters
from serve_app.gateway.openapi.responses import errors, headers, json_response, parameters
from serve_app.gateway.operations import PAGE

Schema = dict[str, Any]

_OPERATOR_KEY: Final[list[Schema]] = [{"operatorKey": []}]
_TEXT: Final = {"type": "string"}
_PERIOD: Final = {"anyOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}]}
_ACCOUNT: Final = path_parameter("account_id", "An account's id.")
_GRANT: Final = path_parameter("grant_id", "A grant's number.")
_KEY: Final = path_parameter("key_id", "A key's id.")


def admin_paths() -> dict[str, Schema]:
    """Path items by path, without prefix."""
    return {**_accounts(), **_keys(), **_usage(), **_service()}


def _accounts() -> dict[str, Schema]:
    tag, one = "Accounts", "/admin/accounts/{account_id}"
    create = _change(
        "createAccount", tag, "Create an account", "Account", body="CreateAccount", once=True, created=True
    )
    correct = _change("correct", tag, "Correct a balance", "Account", _ACCOUNT, body="Correction", once=True)
    limits = _change("setLimits", tag, "Change limits", "Account", _ACCOUNT, body="LimitChanges")
    take_back = _change(
        "takeBackGrant", tag, "Take back a grant", "Account", _ACCOUNT, _GRANT, body="TakeBack", once=True
    )
    return {
        "/admin/accounts": {
            "post": create,
            "get": _read("listAccounts", tag, "List accounts", "AccountPage", *_page(100, MOST_ACCOUNTS)),
        },
        one: {"get": _read("getAccount", tag, "Show an account", "Account", _ACCOUNT)},
        f"{one}/credit": {"post": _change("credit", tag, "Add funds", "Account", _ACCOUNT, body="Credit", once=True)},
        f"{one}/correct": {"post": correct},
        f"{one}/grants": {"get": _read("listGrants", tag, "List grants", "GrantList", _ACCOUNT)},
        f"{one}/grants/{{grant_id}}/take-back": {"post": take_back},
        f"{one}/limits": {"patch": limits},
        f"{one}/suspend": {"post": _change("suspend", tag, "Suspend an account", "Account", _ACCOUNT)},
        f"{one}/resume": {"post": _change("resume", tag, "Resume an account", "Account", _ACCOUNT)},
    }


def _keys() -> dict[str, Schema]:
    create = _change("createKey", "Keys", "Create a key", "NewKey", _ACCOUNT, body="CreateKey", created=True)
    return {
        "/admin/accounts/{account_id}/keys": {
            "post": create,
            "get": _read("listKeys", "Keys", "List an account's keys", "KeyList", _ACCOUNT),
        },
        "/admin/keys/{key_id}": {
            "patch": _change("updateKey", "Keys", "Change what a key may do", "Key", _KEY, body="KeyChanges"),
            "delete": _change("revokeKey", "Keys", "Revoke a key", "Key", _KEY),
        },
    }


def _usage() -> dict[str, Schema]:
    groups = usage_parameters("day", "model", "key", "account")
    page = [*_filters(), *_period(), *_page(PAGE, PAGE)]
    return {
        "/admin/usage": {"get": _read("sumUsage", "Usage", "Usage by group", "AdminUsage", *_filters(), *groups)},
        "/admin/usage/requests": {"get": _read("listRequests", "Usage", "Requests as billed", "RequestPage", *page)},
        "/admin/usage/export": {"get": _export()},
    }


def _service() -> dict[str, Schema]:
    record = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
    page = [
        query_parameter("account", "Only this account.", _TEXT),
        query_parameter("after", "`next` of the page before.", record),
        _limit(100, MOST_RECORDS),
    ]
    return {
        "/admin/audit": {"get": _read("listAudit", "Service", "What operators did", "AuditPage", *page)},
        "/admin/ledger/check": {"get": _read("checkLedger", "Service", "Prove the books", "LedgerCheck")},
        "/admin/models": {"get": _read("listBackends", "Service", "Identifiers and backends", "AdminModelList")},
    }


def _read(operation: str, tag: str, summary: str, reply: str, *given: Schema) -> Schema:
    # A page of accounts begins after one of them, which must exist.
    named = any(one["in"] == "path" for one in given) or reply == "AccountPage"
    missing = (404,) if named else ()
    wrong = (422,) if any(one["in"] == "query" for one in given) else ()
    return {
        "operationId": operation,
        "tags": [f"Operator: {tag}"],
        "summary": summary,
        "security": _OPERATOR_KEY,
        "parameters": [*given, *parameters("RequestId")],
        "responses": {"200": json_response("Done.", reply), **errors(401, *missing, *wrong, 429, 500, 503)},
    }


def _change(
    operation: str,
    tag: str,
    summary: str,
    reply: str,
    *given: Schema,
    body: str | None = None,
    once: bool = False,
    created: bool = False,
) -> Schema:
    """With `once`, an idempotency key makes sure that the change happens once."""
    made = _read(operation, tag, summary, reply, *given)
    made["parameters"] += parameters("Operator", *(("ChangeKey",) if once else ()))
    answers = made["responses"]
    if created:
        answers["201"] = answers.pop("200")
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"}
        kind: type[BaseModel] = getattr(admin_bodies, body)
        needed = any(field.is_required() for field in kind.model_fields.values())
        made["requestBody"] = {"required": needed, "content": {"application/json": {"schema": schema}}}
        answers |= errors(400, 408)
    answers |= errors(422)
    made["responses"] = dict(sorted(answers.items()))
    return made


def _export() -> Schema:
    form = query_parameter("format", "Of the file.", {"type": "string", "enum": ["csv", "json"], "default": "csv"})
    given = [*_filters(), *_period(), form]
    made = _read("exportRequests", "Usage", "All requests as billed, as one file", "RequestRecord", *given)
    records = {"type": "array", "items": {"$ref": "#/components/schemas/RequestRecord"}}
    made["responses"]["200"] = {
        "description": "The file, of any length. One that is cut ends without the last chunk of its transfer.",
        "headers": {
            **headers("x-request-id"),
            "content-disposition": {"required": True, "schema": {"type": "string", "pattern": "^attachment; "}},
        },
        "content": {"text/csv": {"schema": {"type": "string"}}, "application/json": {"schema": records}},
    }
    return made


def _filters() -> list[Schema]:
    return [query_parameter(name, f"Only this {name}.", _TEXT) for name in ("account", "key", "model")]


def _period() -> list[Schema]:
    return [
        query_parameter("from", "A day in UTC, or a time from which on requests have ended.", _PERIOD),
        query_parameter("to", "A day in UTC that is included, or a time before which they have.", _PERIOD),
    ]


def _page(default: int, most: int) -> list[Schema]:
    return [query_parameter("after", "`next` of the page before.", _TEXT), _limit(default, most)]


def _limit(default: int, most: int) -> Schema:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return query_parameter("limit", "The most rows of a page.", schema)
