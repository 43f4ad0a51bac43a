"""The operators' API reference, behind sign-in. Customers read `/docs` of the service."""

from __future__ import annotations

from typing import Final

from fastapi.responses import Response

from serve_app.console.web import Refused, Visit

#: Swagger UI, which the gateway serves, sets styles from scripts and embeds its icons as data: URLs.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


async def show(visit: Visit) -> Response:
    response = visit.page("operator_api.html")
    response.headers["content-security-policy"] = POLICY
    return response


async def document(visit: Visit) -> Response:
    if visit.console.document is None:
        raise Refused(404, "This console can't reach a gateway.")
    return Response(await visit.console.document(), media_type="application/json")
