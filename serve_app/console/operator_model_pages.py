"""Pages for operators about models: backends, traffic with a canary, and prices.

A gateway makes each change with the function that `/admin` uses, so the checks are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import comb
from typing import Any, Final

from fastapi.responses import Response

from serve_app.console.audit_sentences import actor_name
from serve_app.console.operator_overview_pages import currency_of
from serve_app.console.web import Refused, Visit
from serve_app.contracts.calls import Unavailable

ENOUGH: Final = 30  # minimum requests of each backend for a meaningful difference
SAME: Final = 0.05  # if two durations differ by a smaller part than this, the page says "about as fast"
CUTS: Final = {"p50": "the median", "p95": "p95"}
CHANCE: Final = 0.05  # a higher failure rate counts if the probability that it is chance is below this


async def models(visit: Visit) -> Response:
    found = await visit.console.administer_or_refuse("models")
    currency = await currency_of(visit)
    return visit.page("operator_models.html", models=found["models"], backends=found["backends"], currency=currency)


async def model(visit: Visit, failed: str = "", error: Refused | None = None) -> Response:
    """Shows a model. `failed` is the form whose `error` the page shows."""
    wanted, ask = visit.request.path_params["model"], visit.console.administer_or_refuse
    shown = await ask("model", {"id": wanted})
    deployed = (await ask("models"))["backends"]
    try:
        compared = await ask("comparison", {"id": wanted})
    except (Refused, Unavailable):
        compared = None
    names = [one["name"] for one in shown["backends"]]
    return visit.page(
        "operator_model.html",
        200 if error is None else error.status,
        model=shown,
        compared=compared,
        rows=(rows := comparison(shown, compared)),
        verdicts=[text for text in map(verdict, rows) if text],
        choices=[*names, *(one["name"] for one in deployed if one["name"] not in names and one["retired_at"] is None)],
        history=[
            {**one, "at": _unix(one["changed_at"]), "actor": actor_name(one["actor"])} for one in shown["history"]
        ],
        prices=(prices := [{**one, "at": _unix(one["effective_at"])} for one in shown["prices"]]),
        since=_since(prices, shown["price"], visit.console.now()),
        version=0 if shown["traffic"] is None else shown["traffic"]["version"],
        failed=failed,
        problem="" if error is None else str(error),
        form=visit.form,
        enough=ENOUGH,
        same=SAME,
        currency=await currency_of(visit),
        section="/operator/models",
    )


def comparison(shown: Mapping[str, Any], compared: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the model's backends, the one with the largest share first, with figures relative to that one."""
    by_name = {} if compared is None else {one["backend"]: one for one in compared["backends"]}
    backends = sorted(shown["backends"], key=lambda one: (-one["share"], one["name"]))
    rows, stable = list[dict[str, Any]](), None
    for backend in backends:
        figures = by_name.get(backend["name"])
        row = {**backend, "figures": figures, "changes": {}, "error_rate": None, "is_stable": not rows}
        row |= {"is_enough": False, "fails_more": False, "stable_rate": None, "stable": stable}
        if figures is not None and figures["requests"]:
            row["error_rate"] = figures["failed"] / figures["requests"]
        if stable is not None and figures is not None:
            row["changes"] = {
                (name, cut): figures[name][cut] / stable[name][cut] - 1
                for name in ("first_token_ms", "per_token_ms", "total_ms")
                for cut in ("p50", "p95")
                if figures[name] and stable[name] and stable[name][cut]
            }
            row["is_enough"] = min(figures["requests"], stable["requests"]) >= ENOUGH
            row["stable_rate"] = stable["failed"] / stable["requests"] if stable["requests"] else None
            row["fails_more"] = row["is_enough"] and _fails_more(figures, stable)
        if not rows:
            stable = figures
        rows.append(row)
    return rows


def _fails_more(figures: Mapping[str, Any], stable: Mapping[str, Any]) -> bool:
    """Returns whether a backend fails more often than the stable one, by Fisher's exact test."""
    failed, requests = figures["failed"], figures["requests"]
    all_failed, all_requests = failed + stable["failed"], requests + stable["requests"]
    if not failed * stable["requests"] > stable["failed"] * requests:
        return False
    ways = sum(
        comb(requests, number) * comb(stable["requests"], all_failed - number)
        for number in range(failed, min(requests, all_failed) + 1)
    )
    return ways < CHANCE * comb(all_requests, all_failed)


def verdict(row: Mapping[str, Any]) -> str:
    """Returns a sentence that judges a canary by its figures; empty without figures."""
    figures = row["figures"]
    if row["is_stable"] or not figures or not figures["requests"]:
        return ""
    requests, failed, name = figures["requests"], figures["failed"], row["name"]
    speeds = _speeds(row)
    if not row["is_enough"]:
        number = min(requests, (row["stable"] or {"requests": 0})["requests"])
        so_far = f" So far: first token {speeds}." if speeds else ""
        return f"{name}: too few requests to judge ({number} of the {ENOUGH} needed on each backend).{so_far}"
    told = f"{failed:,} of {requests:,} requests failed"
    if row["fails_more"]:
        told += ", more than on the stable backend"
    elif row["error_rate"] > row["stable_rate"]:
        told += ", too few to judge"
    elif failed:
        told += ", no more than on the stable backend"
    return f"{name}: {told}{f'; first token {speeds}' if speeds else ''}."


def _speeds(row: Mapping[str, Any]) -> str:
    """Compares the first token with that of the stable backend: "about as fast at the median, 9% faster at p95"."""
    found = [(row["changes"].get(("first_token_ms", cut)), name) for cut, name in CUTS.items()]
    return ", ".join(f"{_speed(by)} at {name}" for by, name in found if by is not None)


def _speed(by: float) -> str:
    return "about as fast" if abs(by) < SAME else f"{abs(by):.0%} {'slower' if by > 0 else 'faster'}"


async def canary(visit: Visit) -> Response:
    try:
        share = float(visit.form.get("share", "").strip().rstrip("%"))
    except ValueError:
        return await model(visit, "canary", Refused(422, "Give the share as a percentage from 0 to 100."))
    body = {"backend": visit.form.get("backend", ""), "share": share}
    return await _change(visit, "canary", body, f"{body['backend']} gets {share:g}% of the requests")


async def promote(visit: Visit) -> Response:
    backend = visit.form.get("backend", "")
    return await _change(visit, "promote", {"backend": backend}, f"{backend} gets all requests")


async def roll_back(visit: Visit) -> Response:
    return await _change(visit, "rollback", {}, "Traffic rolled back")


async def price(visit: Visit) -> Response:
    body: dict[str, Any] = {name: visit.form.get(name, "").strip() for name in ("input", "cached_input", "output")}
    if at := visit.form.get("effective_at", "").strip():
        try:
            moment = datetime.fromisoformat(at).replace(tzinfo=UTC)
        except ValueError:
            return await model(visit, "price", Refused(422, "Give the time as YYYY-MM-DDTHH:MM, in UTC."))
        body["effective_at"] = moment.isoformat().replace("+00:00", "Z")
    wanted = visit.request.path_params["model"]
    try:
        await visit.console.administer_or_refuse("price", {"id": wanted, "body": body}, visit.audit)
    except Refused as error:
        return await model(visit, "price", error)
    return visit.go(f"/operator/models/{wanted}", done="Price scheduled" if at else "Price set")


async def _change(visit: Visit, operation: str, body: dict[str, Any], done: str) -> Response:
    """Shifts traffic. The form's `expected` is the version of the traffic weights that the page showed."""
    wanted, expected = visit.request.path_params["model"], visit.form.get("expected", "")
    if reason := visit.form.get("reason", "").strip():
        body["reason"] = reason
    if expected.isascii() and expected.isdigit() and len(expected) < 19:
        body["expected"] = int(expected)
    try:
        await visit.console.administer_or_refuse(operation, {"id": wanted, "body": body}, visit.audit)
    except Refused as error:
        return await model(visit, operation, error)
    return visit.go(f"/operator/models/{wanted}", done=done)


def _since(prices: Sequence[Mapping[str, Any]], current: Mapping[str, Any], now: float) -> float | None:
    """Returns when the current price took effect; None if the ledger does not know."""
    begun = [one for one in prices if one["at"] <= now]
    if not begun:
        return None
    latest = max(begun, key=lambda one: (one["at"], one["version"]))
    is_current = all(latest[name] == current[name] for name in ("input", "cached_input", "output"))
    return float(latest["at"]) if is_current else None


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
