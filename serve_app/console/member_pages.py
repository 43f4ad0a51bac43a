"""The members of an account and their invitations."""

from __future__ import annotations

import secrets
from typing import Final

from fastapi.responses import Response

from serve_app.console import messages
from serve_app.console.web import Refused, Visit
from serve_app.contracts import people
from serve_app.contracts.key_format import digest

INVITATION_S: Final = 72 * 3600.0
ROLES: Final = {
    "owner": "Everything, including members and billing",
    "member": "API keys, playground and usage",
    "billing": "Usage, billing and alerts",
}


async def members(visit: Visit) -> Response:
    account_id = visit.request.path_params["account_id"]
    there, invited = await visit.console.books.run(people.ListPeople(account_id))
    return visit.page("members.html", people=there, invitations=invited, roles=ROLES)


async def invite(visit: Visit) -> Response:
    account_id, role = visit.request.path_params["account_id"], visit.form.get("role", "")
    if role not in ROLES:
        raise Refused(422, "Choose a role.", "role")
    token, email = secrets.token_urlsafe(32), visit.form.get("email", "").strip()
    expires_at = visit.console.now() + INVITATION_S
    command = people.InvitePerson(
        account_id, email, role, digest(token), expires_at, visit.audit, by_owner=True, invited_by=visit.me.name
    )
    made = await visit.console.books.run(command)
    url = visit.request.url
    link = f"{url.scheme}://{url.netloc}{visit.root}/invitations/{token}"
    return visit.page("invited.html", 201, invitation=made, link=link, is_mailed=_mail(visit, made, token))


async def change(visit: Visit) -> Response:
    """Changes or removes the role of a member."""
    account_id, user_id = (visit.request.path_params[name] for name in ("account_id", "user_id"))
    role = visit.form.get("role", "")
    if role not in (*ROLES, "none"):
        raise Refused(422, "Choose a role.", "role")
    wanted = None if role == "none" else role
    await visit.console.books.run(people.SetMembership(account_id, user_id, wanted, visit.audit))
    path = "/" if user_id == visit.me.user_id else f"/accounts/{account_id}/members"
    return visit.go(path, done="Member removed" if wanted is None else "Role changed")


async def revoke(visit: Visit) -> Response:
    account_id, wanted = (visit.request.path_params[name] for name in ("account_id", "invitation_id"))
    _, invited = await visit.console.books.run(people.ListPeople(account_id))
    if wanted not in {one.invitation_id for one in invited}:
        raise Refused(404, "This account has no such invitation.")
    await visit.console.books.run(people.RevokeInvitation(wanted, visit.audit))
    return visit.go(f"/accounts/{account_id}/members", done="Invitation revoked")


def _mail(visit: Visit, invitation: people.Invitation, token: str) -> bool:
    """Mails the invitation in the background. Returns whether it will be sent; the page shows the link in any case."""
    console, product = visit.console, visit.console.brand.name
    if console.mailer is None or not console.mails_links:
        return False
    if console.attempts.begin_mail(None, invitation.email):
        return False
    named = {"inviter": visit.me.name, "account": invitation.account_name, "role": invitation.role}
    text = messages.INVITED.format(product=product, link=visit.link(f"/invitations/{token}"), **named)
    subject = f"Invitation to {product}"  # without the names of the inviter and the account, which strangers choose
    return console.mailer.later(console.mailer.send(invitation.email, subject, text))
