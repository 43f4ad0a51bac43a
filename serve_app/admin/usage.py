"""Endpoints for usage: as sums, as pages, or as one file of any length. They require the operator key."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Final, Literal, Self

from fastapi.responses import StreamingResponse
from pydantic import BeforeValidator, Field, WithJsonSchema
from starlette.types import Send

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import (
    INTEGER,
    AccountId,
    BackendName,
    Count,
    Day,
    Instant,
    KeyId,
    ModelId,
    Money,
    Next,
    PerMillion,
    Query,
    Reply,
    RequestId,
    Schema,
    moment,
)
from serve_app.api import errors
from serve_app.api.errors import ApiError
from serve_app.contracts import commands
from serve_app.contracts.books import UsageRecord, UsageRow
from serve_app.storage.exports import FORMATS, REQUEST_COLUMNS, Row, request_row

logger = logging.getLogger("ray.serve")

PAGE = 1000  # requests that an export holds in memory at one time

endpoint = Endpoints("Operator: Usage", "operatorKey")


class Groups(Reply):
    day: Day | None = None
    model: ModelId | None = None
    account_id: AccountId | None = None
    key_id: KeyId | None = None
    tag: str | None = Field(None, description="Empty: keys without a tag.", examples=["website"])


class TokenSums(Reply):
    requests: Count = Field(examples=[1280])
    prompt_tokens: Count = Field(examples=[1_536_000])
    cached_tokens: Count = Field(description="Cached part of `prompt_tokens`.", examples=[256_000])
    completion_tokens: Count = Field(examples=[435_200])
    total_tokens: Count = Field(description="Sum of prompt and completion tokens.", examples=[1_971_200])
    charged: Money = Field(examples=["0.84224"])

    @classmethod
    def from_row(cls, row: UsageRow) -> Self:
        return cls.from_fields(row, total_tokens=row.prompt_tokens + row.completion_tokens)


class AdminUsageSums(TokenSums, Groups):
    """Sums of one group; fields that are not grouped by are null."""


class AdminUsage(Reply):
    """Usage by group."""

    data: list[AdminUsageSums]


class RequestRecord(Reply):
    """A request as billed."""

    request_id: RequestId
    account_id: AccountId
    key_id: KeyId
    model: ModelId
    backend: BackendName
    outcome: Literal["completed", "cancelled", "failed"] = Field(
        description="`cancelled`: the client disconnected, or its stream failed; what was produced is billed. "
        "`failed`: the service failed; nothing is billed."
    )
    started_at: Instant
    finished_at: Instant = Field(examples=["2026-11-30T12:00:01.840Z"])
    settled_at: Instant = Field(description="When it was billed, in UTC.", examples=["2026-11-30T12:00:01.852Z"])
    prompt_tokens: Count = Field(examples=[1200])
    cached_tokens: Count = Field(description="Cached part of `prompt_tokens`.", examples=[200])
    completion_tokens: Count = Field(examples=[340])
    total_tokens: Count = Field(description="Sum of prompt and completion tokens.", examples=[1540])
    price_input: PerMillion
    price_cached_input: PerMillion = Field(examples=["0.07"])
    price_output: PerMillion = Field(examples=["1.10"])
    charged: Money = Field(examples=["0.000658"])
    uncollected: Money = Field(description="Amount that the balance did not cover.", examples=["0.00"])

    @classmethod
    def from_record(cls, row: UsageRecord) -> RequestRecord:
        return cls.from_fields(
            row,
            outcome=str(row.outcome),
            total_tokens=row.prompt_tokens + row.completion_tokens,
            price_input=row.price.input,
            price_cached_input=row.price.cached_input,
            price_output=row.price.output,
        )


class RequestPage(Reply):
    """A page of requests."""

    data: list[RequestRecord]
    next: Next


class OwnFilters(Query):
    key: str | None = Field(None, description="Only this key.")
    model: str | None = Field(None, description="Only this model.")
    tag: str | None = Field(None, description="Only keys that have this tag now; empty: keys without a tag.")


class Filters(OwnFilters):
    account: str | None = Field(None, description="Only this account.")


def listed(text: str) -> list[str]:
    """Splits a comma-separated text."""
    return [part.strip() for part in text.split(",") if part.strip()]


_Day = Annotated[str, Field(json_schema_extra={"format": "date"})]


class Days(Query):
    first: _Day | None = Field(None, alias="from", description="The first day, in UTC.")
    last: _Day | None = Field(None, alias="to", description="The last day, in UTC.")


class SumQuery(Days, Filters):
    group_by: Annotated[list[commands.Group], BeforeValidator(listed)] = Field(
        ["day"], description="Comma-separated. A key with several tags counts in each of them."
    )


_DAY_OR_TIME: Final = WithJsonSchema(
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}]}
)
_Since = Annotated[float, BeforeValidator(partial(moment, param="from", day="its start")), _DAY_OR_TIME]
_Until = Annotated[float, BeforeValidator(partial(moment, param="to", day="its end")), _DAY_OR_TIME]


class Period(Query):
    since: _Since | None = Field(
        None,
        alias="from",
        description="Only requests that ended on or after this day in UTC, or at or after this time.",
    )
    until: _Until | None = Field(
        None, alias="to", description="Only requests that ended on or before this day in UTC, or before this time."
    )


class Page(Period):
    after: str | None = Field(None, description="`next` of the previous page.")
    limit: Annotated[int, INTEGER] = Field(PAGE, ge=1, le=PAGE, description="Maximum number of rows per page.")


class RequestsQuery(Page, Filters):
    """GET /admin/usage/requests."""


class ExportQuery(Period, Filters):
    format: Literal["csv", "json"] = Field("csv", description="Format of the file.")


_FILE: Final[Schema] = {
    "description": "The file, of any length. An incomplete file ends without the last chunk of the transfer.",
    "headers": {
        "x-request-id": {"$ref": "#/components/headers/x-request-id"},
        "content-disposition": {"required": True, "schema": {"type": "string", "pattern": "^attachment; "}},
    },
    "content": {
        "text/csv": {"schema": {"type": "string"}},
        "application/json": {
            "schema": {"type": "array", "items": {"$ref": "#/components/schemas/RequestRecord"}},
        },
    },
}


class Download(StreamingResponse):
    """A file of unknown length.

    If the ledger becomes unavailable midway, the connection is closed without the last chunk. The client then knows
    that the file is incomplete.
    """

    def __init__(self, content: AsyncIterator[str], name: str) -> None:
        headers = {"content-disposition": f'attachment; filename="usage.{name}"', "cache-control": "no-store"}
        super().__init__(content, media_type=FORMATS[name].media_type, headers=headers)

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except ApiError as error:
            logger.warning("an export was cut: %s", error)


@endpoint("GET", "/admin/usage", "Sum usage by group", success="One row for each group with requests.")
async def sum_usage(admin: AdminServices, query: SumQuery) -> AdminUsage:
    """A request counts on the day in UTC on which it ended."""
    groups = tuple(query.group_by)
    rows = await admin.run(
        commands.SumUsage(query.account, query.key, query.model, query.first, query.last, groups, query.tag)
    )
    return AdminUsage(data=[AdminUsageSums.from_row(row) for row in rows])


@endpoint(
    "GET",
    "/admin/usage/requests",
    "List requests as billed",
    success="A page of requests, by account and then oldest first.",
    recorded="read_usage",
)
async def list_requests(admin: AdminServices, query: RequestsQuery) -> RequestPage:
    """The audit log records the call."""
    since, until = span(query)
    wanted = commands.ListUsage(
        query.account, query.key, query.model, since, until, query.after, query.limit, query.tag
    )
    return await page_of(admin, wanted)


@endpoint("GET", "/admin/usage/export", "Export all requests as billed", success=_FILE, recorded="export_usage")
async def export_requests(admin: AdminServices, query: ExportQuery) -> Download:
    """The file has the fields of `/admin/usage/requests`. The audit log records the call."""
    wanted = commands.ListUsage(query.account, query.key, query.model, *span(query), None, PAGE, query.tag)
    pages = _pages(admin, wanted)
    first = await anext(pages)  # read before the response begins: a failure then still sets the HTTP status

    async def file() -> AsyncIterator[str]:
        made = FORMATS[query.format](REQUEST_COLUMNS)
        yield made.head() + made.rows(first)
        async for page in pages:
            yield made.rows(page)
        yield made.tail()

    return Download(file(), query.format)


async def page_of(admin: AdminServices, wanted: commands.ListUsage) -> RequestPage:
    page = await admin.run(wanted)
    return RequestPage(data=[RequestRecord.from_record(row) for row in page.rows], next=page.next)


def span(query: Period) -> tuple[float | None, float | None]:
    """Returns start and end in Unix seconds. Raises 422."""
    since, until = query.since, query.until
    if since is not None and until is not None and since >= until:
        raise errors.invalid_parameters("from must be before to", param="from")
    return since, until


async def _pages(admin: AdminServices, wanted: commands.ListUsage) -> AsyncIterator[list[Row]]:
    while True:
        page = await admin.run(wanted)
        yield [request_row(row) for row in page.rows]
        if page.next is None:
            return
        wanted = replace(wanted, after=page.next)
