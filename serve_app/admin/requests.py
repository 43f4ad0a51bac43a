"""Endpoints that list requests, and show one from the ledger and the log. They require the operator key."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.request_story import RequestSummary, possible_ids, request_ids, tell, without_texts
from serve_app.admin.usage import Filters, Page, RequestPage, RequestRecord, span
from serve_app.admin.values import FLAG, INTEGER, Query, Reply
from serve_app.api import errors
from serve_app.contracts import commands
from serve_app.contracts.books import Audit, Outcome
from serve_app.storage.request_log import Found

endpoint = Endpoints("Operator: Requests", "operatorKey")

_ID: Final = re.compile("[ -~]{1,128}")
# One search at a time, because the files are large. The event loop's default threads must stay free for settlements.
_SEARCHING: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")


class RequestStory(Reply):
    """A request according to the ledger and the log."""

    summary: RequestSummary
    ledger: RequestRecord | None = Field(description="null: not settled, or its month is archived.")
    log: list[dict[str, Any]] = Field(
        description="The request's log lines, oldest first.",
        examples=[
            [
                {
                    "time": "2026-11-30T12:00:00.000Z",
                    "event": "request",
                    "request_id": "chatcmpl-5d41402abc4b2a76b9719d911017c592",
                    "model": "svc-chat",
                    "status": 200,
                    "total_ms": 1852.0,
                }
            ]
        ],
    )
    log_complete: bool = Field(description="false: the search stopped before it had read all files.")
    others: list[str] = Field(description="Other requests with this id, newest first.", examples=[[]])


class TextsQuery(Query):
    texts: Annotated[bool, FLAG] = Field(False, description="Include prompt and reply if the log has them.")


class RecentQuery(Page, Filters):
    status: Literal["completed", "cancelled", "failed"] | None = Field(None, description="Only this outcome.")
    limit: Annotated[int, INTEGER] = Field(50, ge=1, le=1000, description="Maximum number of rows per page.")


@endpoint(
    "GET",
    "/admin/requests",
    "List requests, newest first",
    success="A page of requests. It may be short or empty although more follow.",
    recorded="read_usage",
)
async def list_recent(admin: AdminServices, query: RecentQuery) -> RequestPage:
    """Archived requests are not included. The audit log records the call."""
    since, until = span(query)
    outcome = None if query.status is None else Outcome(query.status)
    wanted = commands.ListRecent(
        query.account, query.key, query.model, outcome, since, until, query.after, query.limit, query.tag
    )
    page = await admin.run(wanted)
    return RequestPage(data=[RequestRecord.from_record(row) for row in page.rows], next=page.next)


@endpoint(
    "GET",
    "/admin/requests/{request_id}",
    "Show what happened to a request",
    success="What the ledger and the log of this gateway's machine know of the request.",
)
async def show_request(admin: AdminServices, request_id: str, query: TextsQuery, audit: Audit) -> RequestStory:
    """Without log lines if the request's log is on another machine. The audit log records the call."""
    if not _ID.fullmatch(request_id):
        raise errors.invalid_parameters("request_id must be 1 to 128 printable ASCII characters", param="request_id")
    found = await _search(admin, request_id)
    wanted, *others = request_ids(request_id, found.lines) or [await known_id(admin, request_id)]
    if wanted != request_id:
        found = await _search(admin, wanted)  # the log lines of replicas have only the request's own id
    record = await admin.run(commands.FindRequest(wanted))
    if record is None and wanted not in request_ids(wanted, found.lines):
        raise errors.not_found(
            f"neither the ledger nor the log here knows {request_id}: its log may be on another node or removed"
        )
    log = [line for line in found.lines if line.get("request_id") == wanted]
    ledger = None if record is None else RequestRecord.from_record(record)
    summary = tell(wanted, None if ledger is None else ledger.model_dump(), log, searched_all=found.is_complete)
    read = commands.RecordAudit(audit, "read_request", wanted, summary.account_id or "", {"texts": query.texts})
    await admin.run(read)
    return RequestStory(
        summary=summary,
        ledger=ledger,
        log=log if query.texts else without_texts(log),
        log_complete=found.is_complete,
        others=others,
    )


async def known_id(admin: AdminServices, asked: str) -> str:
    """Returns the id of the request in the ledger whose id or trace id is `asked`.

    If the ledger has none, returns the first id that a request with this trace id can have, or `asked` itself.
    """
    ids = possible_ids(asked)
    for one in ids:
        if await admin.run(commands.FindRequest(one)) is not None:
            return one
    return ids[0]


async def _search(admin: AdminServices, request_id: str) -> Found:
    """Searches the log. Raises 503 if other searches take too long."""
    try:
        async with asyncio.timeout(admin.patience_s):
            return await asyncio.get_running_loop().run_in_executor(_SEARCHING, admin.find_lines, request_id)
    except TimeoutError:
        raise errors.overloaded("other searches are under way: try again", retry_after_s=5) from None
