"""Operations that the console's operator pages call. A gateway runs them with the handlers of `/admin`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from statistics import quantiles
from typing import Any, Final

from pydantic import ValidationError

from serve_app.admin import backends, models, traffic
from serve_app.admin.endpoint import AdminServices
from serve_app.admin.values import Body, Reply
from serve_app.api import errors
from serve_app.api.errors import ApiError
from serve_app.contracts.books import Audit
from serve_app.contracts.units import HOUR_S
from serve_app.storage.request_log import RECENT_LINES, Line

MAX_REFUSALS: Final = 200
COMPARED_S: Final = 900.0
LATEST_S: Final = 300.0
MINUTE_S: Final = 60.0
CLIENT_LEFT: Final = 499
MAX_COUNTED: Final = 10_000  # maximum requests in one search
CODES: Final = 3  # number of error codes per account: the most frequent ones
KINDS: Final = ("completed", "rejected", "failed", "cancelled")  # kinds of ended requests
_SEARCHING: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="recent")

Run = Callable[[AdminServices, Mapping[str, Any], Audit | None], Awaitable[dict[str, Any]]]


async def _models(admin: AdminServices, _: Mapping[str, Any], __: Audit | None) -> dict[str, Any]:
    return {
        "models": (await models.list_backends(admin)).model_dump()["data"],
        "backends": (await backends.list_deployed(admin)).model_dump()["data"],
    }


async def _model(admin: AdminServices, given: Mapping[str, Any], _: Audit | None) -> dict[str, Any]:
    return (await models.show_model(admin, given["id"])).model_dump()


async def _refusals(admin: AdminServices, given: Mapping[str, Any], _: Audit | None) -> dict[str, Any]:
    """Returns the latest requests of an account that were answered with an error, oldest first."""
    wanted = (f'"account":"{given["account_id"]}"'.encode(), b'"code":"')
    return await _recent(admin, wanted, given["since"], given["until"], MAX_REFUSALS)


async def _refused(admin: AdminServices, given: Mapping[str, Any], _: Audit | None) -> dict[str, Any]:
    """Returns the number of refused requests and the most frequent codes by account, highest number first.

    `unidentified` is the number of those without a valid key.
    """
    found = await _recent(admin, (b'"code":"',), given["since"], given["until"], None)
    codes: dict[str, Counter[tuple[str, int, str | None]]] = {}
    for line in found["lines"]:
        if isinstance(line.get("status"), int) and 400 <= line["status"] < 500:
            reason = (str(line["code"]), line["status"], _denied_model(line))
            codes.setdefault(str(line.get("account") or ""), Counter())[reason] += 1
    unidentified = codes.pop("", Counter()).total()
    by_number = sorted(codes.items(), key=lambda one: (-one[1].total(), one[0]))
    rows = [
        {
            "account": one,
            "refused": of.total(),
            "code": of.most_common(1)[0][0][0],
            "codes": [[code, number, status, model] for (code, status, model), number in of.most_common(CODES)],
        }
        for one, of in by_number
    ]
    is_complete = found["is_complete"] and len(found["lines"]) < RECENT_LINES
    return {"accounts": rows, "unidentified": unidentified, "is_complete": is_complete}


def _denied_model(line: Line) -> str | None:
    """Returns the model that the key may not use; None for any other error."""
    model = line.get("model") if line["code"] == "model_not_found" else None
    return None if model in (None, "none") else str(model)


async def _comparison(admin: AdminServices, given: Mapping[str, Any], _: Audit | None) -> dict[str, Any]:
    """Compares an identifier's backends over the last COMPARED_S seconds."""
    now, wanted = admin.now(), (f'"model":"{given["id"]}"'.encode(),)
    found = await _recent(admin, wanted, now - COMPARED_S, now, None)
    return {"backends": compare(found["lines"]), "seconds": COMPARED_S, "is_complete": found["is_complete"]}


async def _minutes(admin: AdminServices, given: Mapping[str, Any], _: Audit | None) -> dict[str, Any]:
    """Counts the requests of each whole minute from `since` on, and those of the last LATEST_S seconds.

    A search reads at most one hour and MAX_COUNTED requests. If there are more, the reply covers a shorter time.
    """
    now = admin.now()
    begins = max(now - HOUR_S, min(given["since"], now - LATEST_S))
    found = await _recent(admin, (b'"event":"request"',), begins, now, MAX_COUNTED)
    begins = min(now, max(begins, found["known_since"]))
    return await asyncio.get_running_loop().run_in_executor(_SEARCHING, count, found["lines"], begins, now)


async def _recent(
    admin: AdminServices, wanted: tuple[bytes, ...], since: float, until: float, most: int | None
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(admin.patience_s):
            more = {} if most is None else {"most": most}
            found = await asyncio.get_running_loop().run_in_executor(
                _SEARCHING, lambda: admin.recent_lines(wanted, since=since, until=until, **more)
            )
    except TimeoutError:
        raise errors.overloaded("other searches are under way: try again", retry_after_s=5) from None
    return {"lines": found.lines, "is_complete": found.is_complete, "known_since": found.known_since}


def compare(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Returns requests, failures, latencies (ms) and output tokens by backend, sorted by the backend's name."""
    by_backend: dict[str, list[Line]] = {}
    for line in lines:
        if line.get("event") == "request" and line.get("outcome") is not None:
            by_backend.setdefault(str(line.get("backend")), []).append(line)
    return [{"backend": name, **_summary(by_backend[name])} for name in sorted(by_backend)]


def _summary(lines: list[Line]) -> dict[str, Any]:
    failed = sum(line["outcome"] == "failed" or line.get("code") == "server_error" for line in lines)
    done = [line for line in lines if line["outcome"] == "completed"]
    per_token = [
        line["decode_ms"] / (line["completion_tokens"] - 1)
        for line in done
        if line.get("decode_ms") is not None and line.get("completion_tokens", 0) > 1
    ]
    first = [line["first_token_ms"] for line in done if line.get("first_token_ms") is not None]
    return {
        "requests": len(lines),
        "failed": failed,
        "first_token_ms": _percentiles(first),
        "per_token_ms": _percentiles(per_token),
        "completion_tokens": _percentiles(
            [float(line["completion_tokens"]) for line in done if "completion_tokens" in line]
        ),
        "total_ms": _percentiles([line["total_ms"] for line in done if line.get("total_ms") is not None]),
    }


def count(lines: list[Line], begins: float, ends: float) -> dict[str, Any]:
    """Counts the requests of each whole minute between two times, and those of the last LATEST_S seconds."""
    since = max(begins, ends - LATEST_S)
    latest = summarize(line for line in lines if _at(line) >= since)
    return {"minutes": by_minute(lines, begins, ends), "latest": latest | {"seconds": ends - since}}


def by_minute(lines: Iterable[Line], begins: float, ends: float) -> list[dict[str, Any]]:
    """Returns the requests that arrived in each whole minute of a time range, including minutes without requests."""
    first, last = -int(-begins // MINUTE_S), int(ends // MINUTE_S)
    minutes: dict[int, list[Line]] = {minute: [] for minute in range(first, last)}
    for line in lines:
        if (minute := int(_at(line) // MINUTE_S)) in minutes:
            minutes[minute].append(line)
    return [{"at": minute * MINUTE_S, **summarize(some)} for minute, some in minutes.items()]


def summarize(lines: Iterable[Line]) -> dict[str, Any]:
    """Returns the number of requests of each kind, and the median and p95 of the time to the first token (ms)."""
    kinds, first = Counter[str](), list[float]()
    for line in lines:
        kinds[_kind(line)] += 1
        if line.get("outcome") == "completed" and line.get("first_token_ms") is not None:
            first.append(line["first_token_ms"])
    return {kind: kinds[kind] for kind in KINDS} | {"first_token_ms": _percentiles(first)}


def _kind(line: Line) -> str:
    status = line.get("status")
    status = status if isinstance(status, int) else 0
    if line.get("outcome") == "failed" or line.get("code") == "server_error" or status >= 500:
        return "failed"
    if line.get("outcome") == "cancelled" or status == CLIENT_LEFT:
        return "cancelled"
    return "rejected" if status >= 400 else "completed"


def _at(line: Line) -> float:
    return datetime.fromisoformat(str(line["time"])).timestamp()


def _percentiles(values: list[float]) -> dict[str, float] | None:
    """Returns the median and the 95th percentile; None without values."""
    if not values:
        return None
    cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
    return {"p50": round(cuts[9], 3), "p95": round(cuts[18], 3)}


def _changing(handler: Callable[..., Awaitable[Reply]], kind: type[Body]) -> Run:
    async def run(admin: AdminServices, given: Mapping[str, Any], audit: Audit | None) -> dict[str, Any]:
        try:
            body = kind.model_validate(given["body"])
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False)[0]
            param = ".".join(map(str, problem["loc"]))
            raise errors.invalid_parameters(f"{param}: {problem['msg']}", param=param or None) from None
        return (await handler(admin, given["id"], body, audit)).model_dump()

    return run


OPERATIONS: Final[Mapping[str, Run]] = {
    "models": _models,
    "model": _model,
    "refusals": _refusals,
    "refused": _refused,
    "comparison": _comparison,
    "minutes": _minutes,
    "canary": _changing(traffic.set_canary, traffic.Canary),
    "promote": _changing(traffic.promote_backend, traffic.Promotion),
    "traffic": _changing(traffic.set_traffic, traffic.NewWeights),
    "rollback": _changing(traffic.roll_back, traffic.Rollback),
    "price": _changing(models.schedule_price, models.NewPrice),
}


async def run_for_console(
    admin: AdminServices, operation: str, given: Mapping[str, Any], audit: Audit | None
) -> dict[str, Any]:
    """Runs an operation. If it is refused, the answer has only `refused`: the error's status, message and parameter."""
    try:
        return await OPERATIONS[operation](admin, given, audit)
    except ApiError as error:
        return {"refused": {"status": error.status, "message": error.message, "param": error.param}}
