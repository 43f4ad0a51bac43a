"""Pages for operators about the service: credits that need two operators, notices, the audit log, and the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from fastapi.responses import Response

from serve_app.console.audit_sentences import ACTIONS, Sentence, ids_in, label, sentence
from serve_app.console.operator_account_pages import CREDITS
from serve_app.console.operator_overview_pages import currency_of
from serve_app.console.web import Refused, Visit
from serve_app.contracts import commands, operators
from serve_app.contracts.books import AuditRecord
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.errors import LedgerError
from serve_app.contracts.units import HOUR_S

PAGE: Final = 100
DECIDED: Final = 20
CREDITS_READ: Final = 1000  # audit records of credits and payments, among which the latest credits are found
READ: Final = "read_"  # prefix of the actions that change nothing
#: How long a notice is shown, by the form's value.
SPANS: Final = {"4": "4 hours", "24": "1 day", "168": "7 days", "": "Until it is ended"}
LEVEL_NAMES: Final = {"info": "Information", "warning": "Warning", "danger": "Outage"}


async def pending(visit: Visit) -> Response:
    run = visit.console.books.run
    found = await run(operators.ListPendingCredits())
    decided = await run(operators.ListPendingCredits(decided=True, limit=DECIDED))
    credited = await run(commands.ListAudit(limit=CREDITS_READ, action="credit"))
    booked = [one for one in map(_credit, credited) if one is not None][:DECIDED]
    ids = [one.account_id for one in (*found, *decided)] + [one["account_id"] for one in booked]
    return visit.page(
        "operator_credits.html",
        pending=found,
        decided=[one for one in decided if not one.booked],  # booked credits are in `booked`
        booked=booked,
        kinds=CREDITS,
        alone=visit.console.credit_alone,
        currency=await currency_of(visit),
        names=await run(operators.NameSubjects(tuple(dict.fromkeys(ids)))),
    )


def _credit(record: AuditRecord) -> dict[str, Any] | None:
    """Returns a credit that an operator booked in any way; None for a payment that a provider reported."""
    detail = record.detail
    kind, amount, reference = detail.get("kind"), detail.get("amount"), str(detail.get("memo") or "")
    if kind not in CREDITS or not isinstance(amount, int) or reference.startswith(f"{record.actor} "):
        return None
    who = sentence(record, {}).actor
    given = {"account_id": record.account_id, "at": record.at, "actor": who, "kind": kind, "amount": amount}
    return given | {"memo": reference, "expires_at": detail.get("expires_at")}


async def approve(visit: Visit) -> Response:
    return await _decide(visit, approved=True)


async def reject(visit: Visit) -> Response:
    return await _decide(visit, approved=False)


async def _decide(visit: Visit, *, approved: bool) -> Response:
    command = operators.DecideCredit(visit.request.path_params["pending_id"], approved, visit.audit)
    if not await visit.console.books.run(command):
        raise Refused(409, "This credit has already been approved or rejected.")
    return visit.go("/operator/credits", done="Credit approved" if approved else "Credit request closed")


async def audit(visit: Visit) -> Response:
    query, run = visit.request.query_params, visit.console.books.run
    after = query.get("after", "")
    if after and not (after.isascii() and after.isdigit() and len(after) < 19):
        raise Refused(404, "There is no such page.")
    account, actor, action = (query.get(name, "").strip()[:100] for name in ("account", "actor", "action"))
    wanted = commands.ListAudit(
        account or None, int(after) if after else None, PAGE, actor or None, action if action in ACTIONS else None
    )
    found = await run(wanted)
    raw = "1" if query.get("raw") == "1" else ""  # whether to show the stored records
    reads = "1" if query.get("reads") == "1" or action.startswith(READ) else ""  # whether to show reads
    typed = {"account": account, "actor": actor, "action": action}
    chosen = {name: text for name, text in (typed | {"raw": raw, "reads": reads}).items() if text}
    names, currency = await run(operators.NameSubjects(ids_in(found))), await currency_of(visit)
    return visit.page(
        "operator_audit.html",
        log=_folded((one, sentence(one, names, currency)) for one in found if reads or not one.action.startswith(READ)),
        names=names,
        chosen=typed,
        raw=raw,
        reads=reads,
        is_filtered=any(typed.values()),
        actions=[("", "Everything"), *((name, label(name)) for name in ACTIONS)],
        next=await _older(visit, found, wanted, chosen),
    )


def _folded(told: Iterable[tuple[AuditRecord, Sentence]]) -> list[tuple[AuditRecord, Sentence, int]]:
    """Merges consecutive equal records. Returns the first of each run, with the run's length."""
    rows: list[tuple[AuditRecord, Sentence, int]] = []
    for one, text in told:
        last = rows[-1] if rows else None
        if last is not None and (last[1], _told(last[0])) == (text, _told(one)):
            rows[-1] = (last[0], text, last[2] + 1)
        else:
            rows.append((one, text, 1))
    return rows


def _told(one: AuditRecord) -> tuple[object, ...]:
    return one.actor, one.address, one.detail


async def _older(
    visit: Visit, found: list[AuditRecord], wanted: commands.ListAudit, chosen: dict[str, str]
) -> str | None:
    """Returns the query of the next page; None on the last one.

    A search by actor or action reads a limited range of records, so pages may follow one that is not full.
    """
    if len(found) == PAGE:
        return "?" + urlencode(chosen | {"after": found[-1].audit_id})
    if wanted.actor is None and wanted.action is None:
        return None
    if (end := wanted.after) is None:
        latest = await visit.console.books.run(commands.ListAudit(limit=1))
        end = latest[0].audit_id + 1 if latest else 0
    after = end - commands.MAX_SEARCHED
    return "?" + urlencode(chosen | {"after": after}) if after > 1 else None


async def books(visit: Visit) -> Response:
    """Checks the changes since the last full check, and lists settlements that are not booked yet."""
    run = visit.console.books.run
    report = await run(commands.CheckBooks())
    stuck = await run(commands.ListStuck())
    try:
        gateways = (await visit.console.live())["gateways"]
    except Unavailable:
        gateways = None
    names = await run(operators.NameSubjects(tuple(dict.fromkeys(one.account_id for one in stuck))))
    return visit.page("operator_books.html", report=report, stuck=stuck, gateways=gateways, names=names)


async def notices(visit: Visit, problem: str = "") -> Response:
    run = visit.console.books.run
    found = await run(operators.ListAnnouncements(ended=True))
    ids = tuple(dict.fromkeys(one.account_id for one in found if one.account_id))
    return visit.page(
        "operator_notices.html",
        422 if problem else 200,
        published=found,
        names=await run(operators.NameSubjects(ids)),
        levels=[(name, LEVEL_NAMES[name]) for name in operators.LEVELS],
        spans=list(SPANS.items()),
        problem=problem,
        form=visit.form,
    )


async def publish_notice(visit: Visit) -> Response:
    form, now = visit.form, visit.console.now()
    starts_at, ends_at = None, None
    try:
        if begins := form.get("starts_at", "").strip():
            starts_at = datetime.fromisoformat(begins).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return await notices(visit, "Give the start as YYYY-MM-DDTHH:MM, in UTC.")
    hours = form.get("hours", "")
    if hours and hours in SPANS:
        ends_at = (now if starts_at is None else starts_at) + int(hours) * HOUR_S
    command = operators.PublishAnnouncement(
        form.get("text", ""),
        form.get("level", ""),
        visit.audit,
        form.get("account", "").strip(),
        starts_at,
        ends_at,
        form.get("once", ""),
    )
    try:
        await visit.console.books.run(command)
    except LedgerError as error:
        return await notices(visit, str(error))
    visit.console.notices.forget()
    return visit.go("/operator/notices", done="Notice published")


async def end_notice(visit: Visit) -> Response:
    command = operators.EndAnnouncement(visit.request.path_params["notice_id"], visit.audit)
    await visit.console.books.run(command)
    visit.console.notices.forget()
    return visit.go("/operator/notices", done="Notice ended")
