"""`serve-app requests list` and `requests show`: finds requests, and shows what happened to one."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.completion import AccountOption, KeyOption, ModelOption, of_values
from serve_app.cli.output import CommandError, UsageError, short_time
from serve_app.cli.values import parse_age
from serve_app.storage.request_log import PATTERN, PHASES, TEXTS, Line, find_lines

OUTCOMES = ("completed", "cancelled", "failed")
TRACE_ID = "{trace_id}"

app = typer.Typer(name="requests", help="List requests, and show what happened to one.")


@command(
    app,
    "list",
    examples=(
        "serve-app requests list --status failed --since 1h",
        "serve-app requests list --account ACCOUNT_ID --model svc-chat --limit 20",
        "serve-app requests list --from 2026-11-01 --to 2026-11-02 -o json",
    ),
)
def list_requests(
    session: Session,
    *,
    account: AccountOption = None,
    key: KeyOption = None,
    model: ModelOption = None,
    status: Annotated[
        str | None,
        typer.Option(metavar="STATUS", help="Only completed, cancelled or failed.", autocompletion=of_values(OUTCOMES)),
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Only keys that have this tag now.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only the last 30min, 12h, 7d or 4w.", show_default=False)
    ] = None,
    first: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="From this day (UTC) or time on: 2026-11-30.")
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="To the end of this day (UTC), or before this time.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Requests per page.")] = 20,
    after: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Cursor of the previous page, as its last line shows.")
    ] = None,
) -> None:
    """List settled requests, newest first, in pages: completed, cancelled and failed ones. Times are in UTC.

    Refused requests are not in the list: `requests show` finds them by their id.
    """
    if status is not None and status not in OUTCOMES:
        raise UsageError(f"--status {status}: must be one of {', '.join(OUTCOMES)}")
    if since is not None:
        if first is not None:
            raise UsageError("--since and --from cannot be combined: use only one of them")
        first = parse_age("--since", since, datetime.now(UTC))
    filters = {"account": account, "key": key, "model": model, "status": status, "tag": tag, "from": first, "to": last}
    page = session.client.api_get("requests", query={**filters, "limit": limit, "after": after})
    rows, today = page["data"], f"{datetime.now(UTC):%Y-%m-%d}"
    options = {"since": None, **filters, "limit": limit, "after": page["next"]}
    words = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    session.out.table(
        page,
        ("request", "ended", "status", "charged", "model", "prompt", "output", "seconds", "account", "key", "backend"),
        [
            (
                row["request_id"],
                short_time(row["finished_at"]) if session.out.form == "wide" else _recent(row["finished_at"], today),
                row["outcome"],
                row["charged"],
                row["model"],
                row["prompt_tokens"],
                row["completion_tokens"],
                f"{_seconds(row):.1f}",
                row["account_id"],
                row["key_id"],
                row["backend"],
            )
            for row in rows
        ],
        ids=("model", "account", "key", "backend"),
        wide=("prompt", "output", "seconds", "account", "key", "backend"),
        empty="No requests match." if page["next"] is None else "No requests match on this page.",
        footer="" if page["next"] is None else f"Next page: serve-app requests list {' '.join(words)}",
    )


def _recent(text: str, today: str) -> str:
    """Returns the time of a request that ended today, or the day and the time, in UTC."""
    return text[11:19] if text.startswith(today) else text[5:16].replace("T", " ")


def _seconds(row: dict[str, Any]) -> float:
    begun, ended = (datetime.fromisoformat(row[name]) for name in ("started_at", "finished_at"))
    return (ended - begun).total_seconds()


@command(
    app,
    "show",
    examples=(
        "serve-app requests show chatcmpl-…",
        "serve-app requests show X_REQUEST_ID --logs collected/ --json",
        "serve-app requests show TRACE_ID --traces 'https://…/{trace_id}'",
    ),
)
def show_request(
    session: Session,
    request_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Id of the reply, such as chatcmpl-…, its x-request-id, or its trace id."),
    ],
    *,
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also search request logs collected in this folder.")
    ] = None,
    texts: Annotated[bool, typer.Option("--texts", help="Include prompt and reply, if the log has them.")] = False,
    traces: Annotated[
        str | None,
        typer.Option(metavar="URL", envvar="SERVE_APP_TRACES", help=f"URL of a trace's page, with {TRACE_ID}."),
    ] = None,
) -> None:
    """Show status, tokens, price and timings of a request, even if it was refused, and its longest wait."""
    if traces is not None and TRACE_ID not in traces:
        raise UsageError(f"--traces {traces}: must contain {TRACE_ID} in place of the trace's id")
    if logs is not None and not logs.is_dir():
        raise UsageError(f"--logs {logs}: there is no such folder")
    story = _from_service(session, request_id, texts) if logs is None else _with_logs(session, request_id, logs, texts)
    trace_id = story["summary"]["trace_id"]
    story["trace_url"] = None if traces is None or trace_id is None else traces.replace(TRACE_ID, quote(trace_id))
    summary = story["summary"]
    if session.out.document(story, [summary["request_id"]]):
        return
    session.out.record(story, _fields(story))
    timings = [(phase, summary["timings"][f"{phase}_ms"], words) for phase, words in PHASES.items()]
    rows = [(phase, f"{ms:,.1f}", words) for phase, ms, words in timings if ms is not None]
    if rows:
        session.out.line("")
        session.out.table(story, ("part", "ms", "waits for"), rows, empty="")


def _from_service(session: Session, request_id: str, texts: bool) -> dict[str, Any]:
    return session.client.api_get("requests", request_id, query={"texts": "true" if texts else None})


def _with_logs(session: Session, asked: str, folder: Path, texts: bool) -> dict[str, Any]:
    """Adds a folder's log lines to the service's answer.

    `asked` may be a different id, such as a trace id. The request id then comes from a log line, if one has it.
    """
    # Imported here, because pydantic takes longer to load than most commands take to run.
    from serve_app.admin.request_story import possible_ids, request_ids, tell, without_texts

    found = _search(folder, asked)
    wanted, *others = request_ids(asked, found) or [asked]
    story: dict[str, Any] = {"ledger": None, "log": [], "log_complete": True, "others": []}
    unknown: CommandError | None = None
    try:
        story = _from_service(session, wanted, texts)
        wanted = story["summary"]["request_id"]
    except CommandError as error:
        if error.status != 404:
            raise
        unknown = error
        wanted = wanted if found else possible_ids(asked)[0]
    if wanted != asked:
        found = _search(folder, wanted)
    if unknown is not None and wanted not in request_ids(wanted, found):
        raise unknown
    here = [line for line in found if line.get("request_id") == wanted]
    here = here if texts else without_texts(here)
    log = [*story["log"], *(line for line in here if line not in story["log"])]
    return {
        **story,
        "summary": tell(wanted, story["ledger"], log, searched_all=story["log_complete"]).model_dump(),
        "log": log,
        "others": list(dict.fromkeys([*others, *story["others"]])),
    }


def _search(folder: Path, request_id: str) -> list[Line]:
    return find_lines(folder, request_id, pattern=f"**/{PATTERN}", most_bytes=math.inf, most_s=math.inf).lines


def _fields(story: dict[str, Any]) -> Iterator[tuple[str, object]]:
    summary, ledger = story["summary"], story["ledger"]
    yield "what became of it", summary["note"]
    yield "waited longest for", summary["waited_for"]
    yield "request", summary["request_id"]
    yield "door", summary["door"]
    yield "x-request-id", summary["client_request_id"]
    yield "trace", summary["trace_id"]
    if story["trace_url"] is not None:
        yield "trace page", story["trace_url"]
    yield "arrived", summary["time"]
    yield "status", " ".join(str(part) for part in (summary["status"], summary["code"]) if part) or None
    yield "outcome", " ".join(part for part in (summary["outcome"], summary["finish_reason"]) if part) or None
    yield "account", summary["account_id"]
    yield "key", summary["key_id"]
    yield "model", summary["model"]
    yield "backend", summary["backend"]
    yield "replica", summary["replica"]
    yield "prompt tokens", f"{summary['prompt_tokens']:,} ({summary['cached_tokens']:,} cached)"
    yield "completion tokens", summary["completion_tokens"]
    yield "price", summary["price"]
    if ledger is not None and Decimal(ledger["uncollected"]):
        yield "  not covered", ledger["uncollected"]
    for name in ("first_token", "total"):
        ms = summary["timings"][f"{name}_ms"]
        yield name.replace("_", " "), None if ms is None else f"{ms:,.1f} ms"
    for other in story["others"]:
        yield "same id", other
    for line in story["log"]:
        for name in TEXTS:
            if name in line:
                yield name, line[name] if isinstance(line[name], str) else json.dumps(line[name], ensure_ascii=False)
