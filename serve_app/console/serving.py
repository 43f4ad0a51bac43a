"""Decides from the reply of `GET /admin/live` whether users are served now, with one sentence per problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from serve_app.contracts.calls import application_of

State = Literal["ok", "degraded", "failed"]
#: A backend with this status is not down, even without a replica: one starts with the first request.
RUNNING: Final = "RUNNING"


@dataclass(frozen=True, slots=True)
class Serving:
    """The verdict. `ok`: users are served; `degraded`: some are served slowly or not at all; `failed`: nobody is."""

    state: State
    title: str
    reasons: tuple[str, ...] = ()


def serving(live: Mapping[str, Any] | None) -> Serving:
    """Returns the verdict. `live` is None if no limiter answers."""
    if live is None:
        return Serving("failed", "Outage: users are not served", ("No limiter answers, so no request is admitted.",))
    reasons: list[str] = []
    limiters = live["limiters"]
    closed = [str(one.get("shard", number)) for number, one in enumerate(limiters) if not one["admits"]]
    if closed:
        reasons.append(f"Limiter {', '.join(closed)} of {len(limiters)} does not admit requests.")
    by_name = {one["name"]: one for one in live["backends"]}
    down = []
    for model in live["models"]:
        names = [one["name"] for one in model["backends"] if one.get("share", 1)]
        out = [name for name in names if _is_down(by_name.get(application_of(name)))]
        if names and len(out) == len(names):
            down.append(model["id"])
            reasons.append(f"{model['id']} has no running backend: {', '.join(out)} is down.")
        elif out:
            reasons.append(f"{model['id']}: the backend {', '.join(out)} is down; the others answer.")
    for name, one in by_name.items():
        load = one.get("load")
        if load is not None and load.get("pressure", 0) > 1:
            left = round(100 * load.get("effective_share", 1))
            reasons.append(f"{name} is overloaded: the limits of its users are lowered to {left}%.")
    waiting = [one for one in live.get("gateways", ()) if one.get("spool") and one["spool"]["ledger_away"]]
    if waiting:
        settlements = sum(one["spool"]["settlements"] for one in waiting)
        reasons.append(f"The ledger is unavailable: {settlements:,} settlements wait. Users are served meanwhile.")
    if (limiters and len(closed) == len(limiters)) or (live["models"] and len(down) == len(live["models"])):
        return Serving("failed", "Outage: users are not served", tuple(reasons))
    if reasons:
        return Serving("degraded", "Degraded", tuple(reasons))
    return Serving("ok", "Operational")


def _is_down(backend: Mapping[str, Any] | None) -> bool:
    """Returns whether a backend is down. A backend of unknown status counts as up."""
    return backend is not None and backend["status"] is not None and backend["status"] != RUNNING
