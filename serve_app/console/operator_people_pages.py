"""Pages for operators about people: search, and one person with sign-in help."""

from __future__ import annotations

from typing import Final

from fastapi.responses import Response

from serve_app.console.rules import OPERATORS
from serve_app.console.web import Refused, Visit
from serve_app.contracts import operators, people
from serve_app.contracts.commands import RecordAudit
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.units import HOUR_S

MAX_FOUND: Final = 50
LINK_S: Final = 24 * HOUR_S


async def search(visit: Visit) -> Response:
    text = visit.request.query_params.get("search", "")[:100].strip()
    found = await visit.console.books.run(people.SearchPeople(text, MAX_FOUND))
    await visit.console.books.run(RecordAudit(visit.audit, "read_people", "service", detail={"search": text}))
    names = await visit.console.books.run(operators.NameSubjects(_accounts(found)))
    return visit.page("operator_people.html", people=found, search=text, most=MAX_FOUND, names=names)


async def show(visit: Visit) -> Response:
    person = await _person(visit)
    run = visit.console.books.run
    await run(RecordAudit(visit.audit, "read_person", person.user_id))
    return visit.page(
        "operator_person.html",
        person=person,
        sessions=await run(people.ListSessions(person.user_id)),
        names=await run(operators.NameSubjects(tuple(person.roles))),
        wait_s=visit.console.attempts.wait_of(person.email),
        may_change=_may_change(visit, person),
        is_reset=person.password.startswith(people.RESET),
        section="/operator/people",
    )


async def unlock(visit: Visit) -> Response:
    """Forgets the attempts at the person's e-mail address, so that the next one is possible immediately."""
    person = await _changeable(visit)
    visit.console.attempts.forget(person.email)
    await visit.console.books.run(RecordAudit(visit.audit, "allow_sign_in", person.user_id))
    return _back(visit, person, "Sign-in unlocked")


async def reset(visit: Visit) -> Response:
    """Creates a link with which the person chooses a new password. The page shows it once.

    Refused if the person is an operator: with the link, an admin could sign in as that operator and approve credits.
    """
    person = await _changeable(visit)
    if person.operator_role in OPERATORS:
        raise Refused(403, "This person is an operator: use serve-app people reset.")
    token, expires_at = people.new_reset_token(person.email), visit.console.now() + LINK_S
    await visit.console.books.run(people.ResetPerson(person.email, people.reset_text(token, expires_at), visit.audit))
    link = f"{visit.origin}{visit.root}/reset/{token}"
    return visit.page(
        "operator_reset_made.html", 201, person=person, link=link, expires_at=expires_at, section="/operator/people"
    )


async def codes_off(visit: Visit) -> Response:
    person = await _changeable(visit)
    await visit.console.books.run(people.ResetPerson(person.email, None, visit.audit))
    return _back(visit, person, "Two-factor authentication turned off")


async def end_sessions(visit: Visit) -> Response:
    person = await _changeable(visit)
    for one in await visit.console.books.run(people.ListSessions(person.user_id)):
        await visit.console.books.run(people.EndSession(person.user_id, one.session_id, visit.audit))
    return _back(visit, person, "All sessions ended")


async def suspend(visit: Visit) -> Response:
    person = await _changeable(visit)
    is_suspended = visit.form.get("suspended") == "yes"
    await visit.console.books.run(people.SuspendPerson(person.email, is_suspended, visit.audit))
    return _back(visit, person, "Person suspended" if is_suspended else "Person reactivated")


async def _person(visit: Visit) -> people.Person:
    """Returns the person that the path names. Raises Refused."""
    try:
        return await visit.console.books.run(people.GetPerson(visit.request.path_params["person_id"]))
    except InvalidValue:
        raise Refused(404, "There is no such person.") from None


async def _changeable(visit: Visit) -> people.Person:
    """Returns the person. Raises Refused for an operator, unless the visitor is an admin."""
    person = await _person(visit)
    if not _may_change(visit, person):
        raise Refused(403, "This person is an operator: only an admin may do this.")
    return person


def _may_change(visit: Visit, person: people.Person) -> bool:
    """Returns whether the visitor may change a person.

    Only an admin may change an operator: others could take over the operator's login.
    """
    return visit.me.operator_role == "admin" or person.operator_role not in OPERATORS


def _accounts(found: list[people.Person]) -> tuple[str, ...]:
    ids = dict.fromkeys(account_id for person in found for account_id in person.roles)
    return tuple(ids)[:500]


def _back(visit: Visit, person: people.Person, done: str) -> Response:
    return visit.go(f"/operator/people/{person.user_id}", done=done)
