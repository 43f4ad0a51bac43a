"""Current activity, for operators."""

from __future__ import annotations

from fastapi.responses import Response

from serve_app.console.web import Visit


async def show(visit: Visit) -> Response:
    hours = visit.console.pressure.by_hour()
    names = sorted({name for _, pressures in hours for name in pressures})
    return visit.page("operator_live.html", live=await visit.console.live(), hours=hours, names=names)
