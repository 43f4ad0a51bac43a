"""Endpoints for the people who may sign in to the console, by account. They require the operator key."""

from __future__ import annotations

import secrets
from typing import Annotated, Final, Literal, Self

from pydantic import Field

from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.values import AccountId, Body, Reply, Time, example
from serve_app.contracts import operators, people, sign_in
from serve_app.contracts.books import Audit
from serve_app.contracts.key_format import digest

endpoint = Endpoints("Operator: People", "operatorKey")

HOURS = 72
_EXAMPLE: Final = "ada@northwind.example"
Email = Annotated[str, Field(min_length=3, max_length=200)]
_KnownEmail = Annotated[str, Field(examples=[_EXAMPLE])]
Role = Literal["owner", "member", "billing"]


class Person(Reply):
    """A person who may sign in to the console."""

    email: _KnownEmail
    name: str = Field(examples=["Ada Kowalska"])
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

    id: str = Field(validation_alias="invitation_id", examples=["inv_4d9r2t7w1x6k8m3p5q0z"])
    account_id: AccountId
    email: str = Field(examples=["ben@northwind.example"])
    role: Role = Field(examples=["member"])
    created_at: Time
    expires_at: Time = Field(examples=["2026-12-03T12:00:00Z"])
    revoked_at: Time | None = Field(description="null: not revoked.", examples=[None])


class NewInvitation(Invitation):
    """A newly created invitation."""

    path: str = Field(
        description="Path of the page that accepts it, relative to the console's URL; shown only once.",
        examples=["/invitations/8sQkV3mZr1Yd0nXb7TfLwGhJ2cPuE5aKi9oRtMv4yBg"],
    )


class PeopleList(Reply):
    """The people of an account and its open invitations."""

    data: list[Person]
    invitations: list[Invitation]


class InvitePerson(Body):
    """A person to invite."""

    model_config = example(email="ben@northwind.example", role="member")

    email: Email
    role: Role
    hours: Annotated[int, Field(ge=1, le=720, description="Hours until the invitation expires.")] = HOURS


class SetOperatorRole(Body):
    """A person's new role."""

    model_config = example(email="kim@service.example", role="finance", account_id="acct_2c5f8j1n4q7t0w3z6b9e")

    email: Email
    role: Literal["admin", "support", "finance", "read-only"] | None = Field(description="null removes the role.")
    account_id: Annotated[str, Field(min_length=1, max_length=100)] | None = Field(
        None, description="A staff account that the person has joined. Required to assign a role."
    )


class OperatorRole(Reply):
    """A person's role on the operator pages of the console."""

    email: str = Field(examples=["kim@service.example"])
    role: Literal["admin", "support", "finance", "read-only"] | None = Field(
        description="null: none.", examples=["finance"]
    )


class SuspendPerson(Body):
    """A person to suspend or to reactivate."""

    model_config = example(email=_EXAMPLE)

    email: Email
    suspended: bool = Field(True, description="false lifts the suspension.")


class ResetPerson(Body):
    """The person, and the parts of the sign-in to reset."""

    model_config = example(email=_EXAMPLE)

    email: Email
    codes_only: bool = Field(False, description="Turns off the one-time codes; the password stays.")
    hours: Annotated[int, Field(ge=1, le=72, description="Hours until the link expires.")] = 24


class NewReset(Reply):
    """The link with which a person chooses a new password."""

    email: _KnownEmail
    path: str | None = Field(
        description="Path of the page, relative to the console's URL; shown only once. null if the password stays.",
        examples=["/reset/YWRhQG5vcnRod2luZC5leGFtcGxl.8sQkV3mZr1Yd0nXb7TfLwGhJ2cPuE5aKi9oRtMv4yBg"],
    )
    expires_at: Time | None = Field(description="null if there is no link.", examples=["2026-12-01T12:00:00Z"])


class NewSignInLink(Reply):
    """A link that signs in an administrator of an account once."""

    path: str = Field(
        description="Path of the page, relative to the console's URL; shown only once.",
        examples=["/first/8sQkV3mZr1Yd0nXb7TfLwGhJ2cPuE5aKi9oRtMv4yBg"],
    )
    expires_at: Time = Field(examples=["2026-11-30T12:10:00Z"])


class Suspended(Reply):
    """Whether a person is suspended from signing in."""

    email: _KnownEmail
    suspended: bool


@endpoint(
    "POST",
    "/admin/accounts/{account_id}/people",
    "Invite a person to the console",
    success="The invitation with the path of its page, which no later reply has.",
    status=201,
)
async def invite_person(admin: AdminServices, account_id: str, body: InvitePerson, audit: Audit) -> NewInvitation:
    """Sends nothing: pass the link on yourself. It works once.

    A new invitation revokes earlier open invitations of the same e-mail address to this account.
    """
    token = secrets.token_urlsafe(32)
    found = digest(token)
    expires_at = admin.now() + body.hours * 3600
    made = await admin.run(people.InvitePerson(account_id, body.email, body.role, found, expires_at, audit))
    return NewInvitation.from_fields(made, path=f"/invitations/{token}")


@endpoint(
    "GET",
    "/admin/accounts/{account_id}/people",
    "List an account's people",
    success="The people of the account and its open invitations, oldest first.",
    recorded="read_people",
)
async def list_people(admin: AdminServices, account_id: str) -> PeopleList:
    """The audit log records the call."""
    persons, invitations = await admin.run(people.ListPeople(account_id))
    return PeopleList(
        data=[Person.of(person, account_id) for person in persons],
        invitations=[Invitation.from_fields(invitation) for invitation in invitations],
    )


@endpoint("DELETE", "/admin/invitations/{invitation_id}", "Revoke an invitation", success="The revoked invitation.")
async def revoke_invitation(admin: AdminServices, invitation_id: str, audit: Audit) -> Invitation:
    """A repeated call changes nothing. An invitation that is unknown or already accepted returns 422."""
    return Invitation.from_fields(await admin.run(people.RevokeInvitation(invitation_id, audit)))


@endpoint(
    "POST",
    "/admin/people/suspend",
    "Suspend or reactivate a person",
    success="Whether the person is suspended now.",
)
async def suspend_person(admin: AdminServices, body: SuspendPerson, audit: Audit) -> Suspended:
    """A suspension ends all sessions of the person and prevents signing in, for all their accounts."""
    person = await admin.run(people.SuspendPerson(body.email, body.suspended, audit))
    return Suspended(email=person.email, suspended=person.suspended)


@endpoint(
    "POST",
    "/admin/people/reset",
    "Reset a person's password and one-time codes",
    success="The path of the page on which the person chooses a new password. No later reply has it.",
)
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


@endpoint(
    "POST",
    "/admin/accounts/{account_id}/sign-in-link",
    "Create a sign-in link for an administrator",
    success="The path of the page that signs in. No later reply has it.",
)
async def make_sign_in_link(admin: AdminServices, account_id: str, audit: Audit) -> NewSignInLink:
    """The link works once, for 10 minutes. It replaces the account's earlier link.

    It signs in an owner of the account who has the operator role `admin` and is not suspended; of several, the person
    who was created first. If there is none, the visitor chooses an e-mail address and a password, and becomes such an
    owner.
    """
    token, expires_at = secrets.token_urlsafe(32), int(admin.now() + sign_in.LINK_S)
    await admin.run(sign_in.MakeSignInLink(account_id, digest(token), expires_at, audit))
    return NewSignInLink.model_validate({"path": f"/first/{token}", "expires_at": expires_at})


@endpoint("POST", "/admin/people/operator", "Set or remove a person's operator role", success="The person's role now.")
async def set_operator_role(admin: AdminServices, body: SetOperatorRole, audit: Audit) -> OperatorRole:
    """To get a role, the person must have joined an account of your staff.

    A change of the role ends all sessions of the person.
    """
    person = await admin.run(operators.SetOperatorRole(body.email, body.role, body.account_id, audit))
    return OperatorRole.from_fields(person, role=person.operator_role)
