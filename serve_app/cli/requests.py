"""`serve-app requests show`: shows what happened to a request, from its id alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.output import CommandError, UsageError
from serve_app.storage.request_log import PATTERN, PHASES, TEXTS, Line, find_lines

TRACE_ID = "{trace_id}"

app = typer.Typer(name="requests", help="Show what happened to a request.")


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
        raise UsageError(f"--traces {traces}: must have {TRACE_ID} where the id of the trace belongs")
    if logs is not None and not logs.is_dir():
        raise UsageError(f"--logs {logs}: there is no such folder")
    story = _from_service(session, request_id, texts) if logs is None else _with_logs(session, request_id, logs, texts)
    trace_id = story["summary"]["trace_id"]
    story["trace_url"] = None if traces is None or trace_id is None else traces.replace(TRACE_ID, quote(trace_id))
    if session.out.as_json:
        session.out.json(story)
        return
    summary = story["summary"]
    session.out.record(story, _fields(story))
    timings = [(phase, summary["timings"][f"{phase}_ms"], words) for phase, words in PHASES.items()]
    rows = [(phase, f"{ms:,.1f}", words) for phase, ms, words in timings if ms is not None]
    if rows:
        session.out.line("")
        session.out.table(story, ("part", "ms", "waits for"), rows, empty="")


def _from_service(session: Session, request_id: str, texts: bool) -> dict[str, Any]:
    return session.client.api_get("requests", request_id, query={"texts": "true" if texts else None})


def _with_logs(session: Session, asked: str, folder: Path, texts: bool) -> dict[str, Any]:
    """Adds a folder's log lines to the service's answer. With these lines the service may find the request."""
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
