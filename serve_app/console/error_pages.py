"""Why requests of an account were rejected or failed: a page for its members and one for operators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final

from fastapi.responses import Response

from serve_app.console.key_names import is_playground, playground_name
from serve_app.console.web import Refused, Visit, check_wait
from serve_app.contracts import commands
from serve_app.contracts.books import AccountSnapshot, KeySnapshot
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import AccountNotFound
from serve_app.contracts.people import ListPeople, Person
from serve_app.contracts.units import DAY_S, HOUR_S

MAX_ERRORS: Final = 200  # maximum errors that a gateway returns
LIMIT_CODES: Final = ("requests", "tokens", "concurrency")  # codes of the limits that operators set
OF_KEY: Final = "of this API key"  # part of the reason if the limit is the key's
SEARCHES_PER_MINUTE: Final = 12  # per person
AROUND_S: Final = 600.0  # before and after the time that a visitor asks about
_NUMBER: Final = re.compile(r"\d[\d.,]*")
#: What a code means, for requests that were logged without a reason.
CODES: Final = {
    "requests": "More requests per minute than the limit.",
    "tokens": "Too many tokens per minute, or the model is busy.",
    "concurrency": "More requests at once than the limit.",
    "wrong_keys": "Too many requests with wrong API keys.",
    "insufficient_balance": "The account's balance did not cover the request.",
    "budget_exceeded": "The API key's budget was spent.",
    "invalid_api_key": "The API key is revoked or expired, or the account is suspended.",
    "address_not_allowed": "The API key may not be used from this IP address.",
    "model_not_found": "The model does not exist, or the API key may not use it.",
    "context_length_exceeded": "The prompt is longer than the model's context.",
    "overloaded": "The model had no capacity.",
    "overloaded_error": "The model had no capacity.",
    "server_error": "The service failed.",
    "invalid_format": "The body was not a valid request.",
    "invalid_parameter": "A parameter was out of range.",
}


async def of_account(visit: Visit) -> Response:
    """Shows the errors of an account to its members."""
    check_wait(visit.console.rates.count((f"errors {visit.me.user_id}", SEARCHES_PER_MINUTE)))
    shown = await visit.console.books.run(commands.GetAccount(visit.request.path_params["account_id"]))
    return await _page(visit, shown, _asked(visit), f"/accounts/{shown.account_id}/requests")


async def for_operators(visit: Visit) -> Response:
    """Shows the errors of an account to operators; the audit log names the reader."""
    run, wanted = visit.console.books.run, visit.request.path_params["id"]
    try:
        shown = await run(commands.GetAccount(wanted))
    except AccountNotFound:
        raise Refused(404, f"There is no account {wanted!r}: search by name or id.") from None
    asked = _asked(visit)
    given = {"from": asked.begins, "to": asked.ends}
    await run(commands.RecordAudit(visit.audit, "read_refusals", wanted, wanted, given))
    return await _page(visit, shown, asked, "/operator/accounts")


@dataclass(frozen=True, slots=True)
class Asked:
    """The errors that a visitor asks for: between two times (Unix seconds), and of one code, if any."""

    begins: float
    ends: float
    code: str
    at: str  # as typed; empty for the last 24 hours
    problem: str


def _asked(visit: Visit) -> Asked:
    now, query = visit.console.now(), visit.request.query_params
    typed, code = query.get("at", "").strip(), query.get("code", "")[:100]
    if typed:
        try:
            at = datetime.fromisoformat(typed).replace(tzinfo=UTC).timestamp()
        except ValueError:
            return Asked(now - DAY_S, now, code, typed, "Give the time as YYYY-MM-DDTHH:MM, in UTC.")
        return Asked(at - AROUND_S, at + AROUND_S, code, typed, "")
    return Asked(now - DAY_S, now, code, "", "")


async def _page(visit: Visit, account: AccountSnapshot, asked: Asked, section: str) -> Response:
    run, account_id, code = visit.console.books.run, account.account_id, asked.code
    found, is_complete = await search(visit, account_id, asked.begins, asked.ends) or (None, True)
    keys, people = await run(commands.ListKeys(account_id)), await run(ListPeople(account_id))
    return visit.page(
        "errors.html",
        422 if asked.problem else 200,
        account=account,
        **numbers(found, is_complete),
        groups=None if found is None else grouped([one for one in found[::-1] if code in ("", one["code"])]),
        counts=_counts(found or ()),
        chart=None if asked.at or not found else _by_hour(found, asked.begins, asked.ends),
        key_names=key_names(keys, people[0]),
        models_of={key.key_id: key.models for key in keys if key.active and key.models and not is_playground(key)},
        asked=asked,
        section=section,
    )


def key_names(keys: Sequence[KeySnapshot], people: Sequence[Person]) -> dict[str, str]:
    """Returns the names of keys by id. The name of a playground key includes its person."""
    of_playgrounds = {playground_name(one.email): f"Playground ({one.name or one.email})" for one in people}
    return {key.key_id: of_playgrounds.get(key.name, key.name) if is_playground(key) else key.name for key in keys}


async def read(visit: Visit, account_id: str, begins: float, ends: float) -> list[dict[str, Any]] | None:
    """Returns the requests that were answered with an error, oldest first; None while no gateway answers."""
    found = await search(visit, account_id, begins, ends)
    return None if found is None else found[0]


async def search(visit: Visit, account_id: str, begins: float, ends: float) -> tuple[list[dict[str, Any]], bool] | None:
    """Like `read`. Also returns whether these are all errors: the search read the whole log and reached no limit."""
    given = {"account_id": account_id, "since": begins, "until": ends}
    try:
        found = await visit.console.administer_or_refuse("refusals", given)
    except (Refused, Unavailable):
        return None
    is_complete = found.get("is_complete", True) and len(found["lines"]) < MAX_ERRORS
    return [_error(line) for line in found["lines"]], is_complete


def _error(line: Mapping[str, Any]) -> dict[str, Any]:
    code = str(line.get("code") or "")
    model = None if line.get("model") in (None, "none") else line["model"]
    what = meaning(code, model)
    reason = str(line.get("reason") or what or code)
    status = line.get("status")
    return {
        "at": datetime.fromisoformat(str(line["time"])).timestamp(),
        "status": status,
        "is_refused": isinstance(status, int) and 400 <= status < 500,
        "code": code,
        "reason": reason,
        "why": what or reason,
        "model": model,
        "key": line.get("key"),
        "request_id": line.get("request_id"),
    }


def meaning(code: str, model: str | None) -> str | None:
    """Returns what a code means; None if unknown. `model` is None if the requested model does not exist."""
    if code == "model_not_found":
        return f"The API key may not use {model}." if model else "The request named a model that does not exist."
    return CODES.get(code)


def numbers(errors: Sequence[Mapping[str, Any]] | None, is_complete: bool = True) -> dict[str, Any]:
    """Returns how many requests were refused and how many failed; None while no gateway answers."""
    if errors is None:
        return {"refused": None, "failures": None, "errors_are_all": True}
    refused = sum(one["is_refused"] for one in errors)
    return {
        "refused": refused,
        "failures": len(errors) - refused,
        "errors_are_all": is_complete and len(errors) < MAX_ERRORS,
    }


def _counts(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns each reason with its number of errors, most frequent first, and whether a higher account limit helps."""
    counts = Counter((one["status"], one["code"], one["why"]) for one in errors)
    of_account = {one["code"] for one in errors if one["code"] in LIMIT_CODES and OF_KEY not in one["reason"]}
    return [
        {"status": status, "code": code, "why": why, "number": number, "is_limit": code in of_account}
        for (status, code, why), number in counts.most_common()
    ]


def grouped(errors: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups consecutive errors that differ only in numbers, such as the seconds to wait."""

    def alike(one: Mapping[str, Any]) -> tuple[Any, ...]:
        return one["status"], one["code"], _NUMBER.sub("#", one["reason"]), one["model"], one["key"]

    return [list(group) for _, group in groupby(errors, alike)]


def _by_hour(errors: Sequence[Mapping[str, Any]], begins: float, ends: float) -> dict[str, Any]:
    """Returns a chart of the errors in each hour (UTC), a series for each reason."""
    hours = range(int(begins // HOUR_S), int(ends // HOUR_S) + 1)
    counts = Counter((one["why"], int(one["at"] // HOUR_S)) for one in errors)
    names = [name for name, _ in Counter(one["why"] for one in errors).most_common()]
    return {
        "labels": [datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%dT%H") for hour in hours],
        "series": [{"name": name.rstrip("."), "values": [counts[name, hour] for hour in hours]} for name in names],
        "type": "bar",
        "stacked": True,
    }
