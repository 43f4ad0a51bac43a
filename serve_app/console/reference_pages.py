"""The operators' API reference, behind sign-in. Customers read `/docs` of the service."""

from __future__ import annotations

import gzip
from typing import Final

from fastapi.responses import Response

from serve_app.console.web import Refused, Visit

#: The viewer, Redoc, sets styles from scripts, embeds its icons as data: URLs, and searches in a worker of a blob: URL.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; worker-src blob:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


async def show(visit: Visit) -> Response:
    response = visit.page("operator_api.html")
    response.headers["content-security-policy"] = POLICY
    return response


async def document(visit: Visit) -> Response:
    if visit.console.document is None:
        raise Refused(404, "This console can't reach a gateway.")
    content, headers = await visit.console.document(), {"vary": "accept-encoding"}
    if "gzip" in visit.request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = gzip.compress(content, mtime=0), "gzip"
    return Response(content, media_type="application/json", headers=headers)
