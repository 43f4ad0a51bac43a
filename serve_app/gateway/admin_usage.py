"""`/admin/usage`: what was used, summed, page by page, or as one file of any length."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from serve_app.api import ApiError, errors
from serve_app.exports import FORMATS, REQUEST_COLUMNS, Format
from serve_app.gateway.admin_bodies import page_of, period_of
from serve_app.gateway.identity import Authenticator
from serve_app.gateway.operations import PAGE, Operations, RequestFilter

logger = logging.getLogger("ray.serve")


def usage_router(authenticator: Authenticator, operations: Operations) -> APIRouter:
    """Sums by group, billed requests in pages, and all of them as a file."""
    router = APIRouter(prefix="/usage")

    @router.get("")
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

    @router.get("/requests")
    async def requests(request: Request) -> JSONResponse:
        authenticator.operator(request)
        limit = page_of(request, default=PAGE, most=PAGE)
        after = request.query_params.get("after")
        return JSONResponse(await operations.requests(filter_of(request), limit=limit, after=after))

    @router.get("/export")
    async def export(request: Request) -> Response:
        authenticator.operator(request)
        name = request.query_params.get("format", "csv")
        if name not in FORMATS:
            raise errors.invalid_parameters(f"format takes {', '.join(FORMATS)}, not {name!r}", param="format")
        pages = operations.request_pages(filter_of(request))
        first = await anext(pages)  # what fails here still has its status
        return Download(_file(FORMATS[name](REQUEST_COLUMNS), first, pages), name)

    return router


def filter_of(request: Request) -> RequestFilter:
    """Which requests are asked for. Raises 422."""
    query = request.query_params
    since, until = period_of(query.get("from"), query.get("to"))
    return RequestFilter(query.get("account"), query.get("key"), query.get("model"), since, until)


async def _file(
    made: Format, first: list[dict[str, Any]], pages: AsyncIterator[list[dict[str, Any]]]
) -> AsyncIterator[str]:
    yield made.head() + made.rows(first)
    async for page in pages:
        yield made.rows(page)
    yield made.tail()


class Download(StreamingResponse):
    """A file of unknown length. When the ledger goes away in the middle, the connection is cut without the last chunk,
    so that nobody takes half a file for a whole one."""

    def __init__(self, content: AsyncIterator[str], name: str) -> None:
        headers = {"content-disposition": f'attachment; filename="usage.{name}"', "cache-control": "no-store"}
        super().__init__(content, media_type=FORMATS[name].media_type, headers=headers)

    async def stream_response(self, send: Send) -> None:
        """See StreamingResponse."""
        try:
            await super().stream_response(send)
        except ApiError as error:
            logger.warning("an export was cut: %s", error)
