"""Endpoints for the people who may sign in to the console, by account. They require the operator key."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal, Self

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import Body, Reply, Time
from serve_app.contracts import operators, people, sign_in
from serve_app.contracts.books import Audit
from serve_app.contracts.key_format import digest

endpoint = Endpoints("Operator: People", "operatorKey")

HOURS = 72
Email = Annotated[str, Field(min_length=3, max_length=200)]
Role = Literal["owner", "member", "billing"]


class Person(Reply):
    """A person who may sign in to the console."""

    email: str
    name: str
    role: Role
    suspended: bool
    totp: bool = Field(description="Whether signing in requires a one-time code.")
    created_at: Time

    @classmethod
    def of(cls, person: people.Person, account_id: str) -> Self:
        has_totp = person.totp_secret is not None
        return cls.from_fields(person, role=person.roles[account_id], totp=has_totp)


class Invitation(Reply):
    """An open invitation without its link, which is not stored."""

    id: str = Field(validation_alias="invitation_id")
    account_id: str
    email: str
    role: Role
    created_at: Time
    expires_at: Time
    revoked_at: Time | None


class NewInvitation(Invitation):
    """A newly created invitation."""

    path: str = Field(description="Path of the page that accepts it, relative to the console's URL; shown only once.")


class PeopleList(Reply):
    """The people of an account and its open invitations."""

    data: list[Person]
    invitations: list[Invitation]


class InvitePerson(Body):
    """POST /admin/accounts/{id}/people."""

    email: Email
    role: Role
    hours: Annotated[int, Field(ge=1, le=720, description="Hours until the invitation expires.")] = HOURS


class SetOperatorRole(Body):
    """POST /admin/people/operator."""

    email: Email
    role: Literal["admin", "support", "finance", "read-only"] | None = Field(description="null removes the role.")
    account_id: Annotated[str, Field(min_length=1, max_length=100)] | None = Field(
        None, description="A staff account that the person has joined. Required to assign a role."
    )


class OperatorRole(Reply):
    """A person's role on the operator pages of the console."""

    email: str
    role: Literal["admin", "support", "finance", "read-only"] | None


class SuspendPerson(Body):
    """POST /admin/people/suspend."""

    email: Email
    suspended: bool = True


class ResetPerson(Body):
    """POST /admin/people/reset."""

    email: Email
    codes_only: bool = Field(False, description="Turns off the one-time codes; the password stays.")
    hours: Annotated[int, Field(ge=1, le=72, description="Hours until the link expires.")] = 24


class NewReset(Reply):
    """The link with which a person chooses a new password."""

    email: str
    path: str | None = Field(
        description="Path of the page, relative to the console's URL; shown only once. null if the password stays."
    )
    expires_at: Time | None


class NewSignInLink(Reply):
    """A link that signs in an administrator of an account once."""

    path: str = Field(description="Path of the page, relative to the console's URL; shown only once.")
    expires_at: Time


class Suspended(Reply):
    """Whether a person is suspended from signing in."""

    email: str
    suspended: bool


@endpoint("POST", "/admin/accounts/{account_id}/people", "Invite a person to the console", status=201)
async def invite_person(admin: AdminServices, account_id: str, body: InvitePerson, audit: Audit) -> NewInvitation:
    token = secrets.token_urlsafe(32)
    found = digest(token)
    expires_at = admin.now() + body.hours * 3600
    made = await admin.run(people.InvitePerson(account_id, body.email, body.role, found, expires_at, audit))
    return NewInvitation.from_fields(made, path=f"/invitations/{token}")


@endpoint("GET", "/admin/accounts/{account_id}/people", "List an account's people", recorded="read_people")
async def list_people(admin: AdminServices, account_id: str) -> PeopleList:
    persons, invitations = await admin.run(people.ListPeople(account_id))
    return PeopleList(
        data=[Person.of(person, account_id) for person in persons],
        invitations=[Invitation.from_fields(invitation) for invitation in invitations],
    )


@endpoint("DELETE", "/admin/invitations/{invitation_id}", "Revoke an invitation")
async def revoke_invitation(admin: AdminServices, invitation_id: str, audit: Audit) -> Invitation:
    return Invitation.from_fields(await admin.run(people.RevokeInvitation(invitation_id, audit)))


@endpoint("POST", "/admin/people/suspend", "Suspend or reactivate a person")
async def suspend_person(admin: AdminServices, body: SuspendPerson, audit: Audit) -> Suspended:
    person = await admin.run(people.SuspendPerson(body.email, body.suspended, audit))
    return Suspended(email=person.email, suspended=person.suspended)


@endpoint("POST", "/admin/people/reset", "Reset a person's password and one-time codes")
async def reset_person(admin: AdminServices, body: ResetPerson, audit: Audit) -> NewReset:
    """Turns off the one-time codes, removes the recovery codes and ends all sessions of the person.

    Without `codes_only`, it also removes the passkeys and creates a link to choose a new password. With `codes_only`,
    nothing changes for a person without one-time codes. The operator must verify the person's identity first.
    """
    if body.codes_only:
        person = await admin.run(people.ResetPerson(body.email, None, audit))
        return NewReset(email=person.email, path=None, expires_at=None)
    token, expires_at = people.new_reset_token(body.email), int(admin.now()) + body.hours * 3600
    person = await admin.run(people.ResetPerson(body.email, people.reset_text(token, expires_at), audit))
    return NewReset.from_fields(person, path=f"/reset/{token}", expires_at=expires_at)


@endpoint("POST", "/admin/accounts/{account_id}/sign-in-link", "Create a sign-in link for an administrator")
async def make_sign_in_link(admin: AdminServices, account_id: str, audit: Audit) -> NewSignInLink:
    """The link works once, for 10 minutes. It replaces the account's earlier link.

    It signs in an owner of the account who has the operator role `admin` and is not suspended; of several, the person
    who was created first. If there is none, the visitor chooses an e-mail address and a password, and becomes such an
    owner.
    """
    token, expires_at = secrets.token_urlsafe(32), int(admin.now() + sign_in.LINK_S)
    await admin.run(sign_in.MakeSignInLink(account_id, digest(token), expires_at, audit))
    return NewSignInLink.model_validate({"path": f"/first/{token}", "expires_at": expires_at})


@endpoint("POST", "/admin/people/operator", "Set or remove a person's operator role")
async def set_operator_role(admin: AdminServices, body: SetOperatorRole, audit: Audit) -> OperatorRole:
    person = await admin.run(operators.SetOperatorRole(body.email, body.role, body.account_id, audit))
    return OperatorRole.from_fields(person, role=person.operator_role)
