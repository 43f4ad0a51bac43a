"""`serve-app people …`: manages the people who may sign in to the console, by account."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.completion import AccountId, complete_account, complete_person
from serve_app.cli.output import UsageError

app = typer.Typer(name="people", help="Invite, list and suspend people of the console.")

ROLES = ("owner", "member", "billing")
OPERATOR_ROLES = ("admin", "support", "finance", "read-only")
Email = Annotated[str, typer.Argument(metavar="EMAIL", help="E-mail address.", autocompletion=complete_person)]
Console = Annotated[
    str | None, typer.Option(metavar="URL", help="Console, for the link. Default: the service's URL and /console.")
]


@command(
    app,
    "invite",
    examples=(
        "serve-app people invite ada@example.org ACCOUNT_ID",
        "serve-app people invite ben@example.org ACCOUNT_ID --role billing --hours 24",
    ),
)
def invite(
    session: Session,
    email: Email,
    account_id: AccountId,
    role: Annotated[str, typer.Option(metavar="ROLE", help="owner, member or billing.")] = "owner",
    hours: Annotated[int, typer.Option(min=1, max=720, help="Hours until the invitation expires.")] = 72,
    console: Console = None,
) -> None:
    """Invite a person. Send them the link, which is shown only once. They use it to choose a password."""
    if role not in ROLES:
        raise UsageError(f"--role {role}: must be one of {', '.join(ROLES)}")
    body = {"email": email, "role": role, "hours": hours}
    made = session.client.api_post("accounts", account_id, "people", body=body)
    link = _link(session, console, made.pop("path"))
    session.out.record(
        {**made, "link": link},
        [
            ("link", link),
            ("email", made["email"]),
            ("role", made["role"]),
            ("id", made["id"]),
            ("ends", made["expires_at"]),
        ],
        note="Anyone with the link gets the role: send it privately.",
    )


@command(app, "list")
def list_people(session: Session, account_id: AccountId) -> None:
    """List an account's people and its open invitations."""
    found = session.client.api_get("accounts", account_id, "people")
    rows = [
        [one["email"], one["role"], "suspended" if one["suspended"] else "active", one["name"], one["created_at"], ""]
        for one in found["data"]
    ]
    rows += [
        [
            one["email"],
            one["role"],
            f"invited until {one['expires_at'][:10]}",
            "",
            one["created_at"],
            one["id"],
        ]
        for one in found["invitations"]
    ]
    session.out.table(
        found,
        ("email", "role", "status", "name", "since", "invitation"),
        rows,
        ids=("invitation",),
        wide=("since",) if found["invitations"] else ("since", "invitation"),
        empty=f"No people yet. Next: serve-app people invite EMAIL {account_id}",
    )


@command(app, "revoke")
def revoke(
    session: Session,
    invitation_id: Annotated[
        str, typer.Argument(metavar="INVITATION_ID", help="Invitation id, as shown by `people list`.")
    ],
) -> None:
    """Revoke an open invitation."""
    made = session.client.api_delete("invitations", invitation_id)
    session.out.record(made, [("id", made["id"]), ("email", made["email"]), ("revoked", made["revoked_at"])])


@command(app, "suspend")
def suspend(
    session: Session,
    email: Email,
    resume: Annotated[bool, typer.Option("--resume", hidden=True)] = False,
) -> None:
    """Suspend a person: all their sessions end, and they can't sign in until `people resume`."""
    _set_suspended(session, email, not resume)


@command(app, "resume")
def resume(session: Session, email: Email) -> None:
    """Let a suspended person sign in again."""
    _set_suspended(session, email, False)


@command(
    app,
    "reset",
    examples=(
        "serve-app people reset ada@example.org",
        "serve-app people reset ada@example.org --codes-only",
    ),
)
def reset(
    session: Session,
    email: Email,
    codes_only: Annotated[
        bool, typer.Option("--codes-only", help="Turn off the one-time codes; the password stays.")
    ] = False,
    hours: Annotated[int, typer.Option(min=1, max=72, help="Hours until the link expires.")] = 24,
    console: Console = None,
) -> None:
    """Help a person who has lost their password or one-time codes. Verify their identity first.

    All their sessions end, and their one-time codes and recovery codes are turned off. Without --codes-only, their
    passkeys are removed too, and a link, which is shown only once, lets them choose a new password.
    """
    body = {"email": email, "codes_only": codes_only, "hours": hours}
    made = session.client.api_post("people", "reset", body=body)
    if (path := made.pop("path")) is None:
        session.out.record(made, [("email", made["email"]), ("one-time codes", "off")])
        return
    link = _link(session, console, path)
    session.out.record(
        {**made, "link": link},
        [("link", link), ("email", made["email"]), ("ends", made["expires_at"])],
        note="Anyone with the link can sign in as this person: send it privately.",
    )


@command(app, "sign-in-link", examples=("serve-app people sign-in-link ACCOUNT_ID",))
def sign_in_link(session: Session, account_id: AccountId, console: Console = None) -> None:
    """Create a sign-in link for an administrator, as `make serve` prints one. It works once, for 10 minutes.

    It signs in an owner of the account who has the operator role admin and is not suspended; of several, the person who
    was created first. If there is none, the visitor becomes such an owner.
    """
    made = session.client.api_post("accounts", account_id, "sign-in-link")
    link = _link(session, console, made.pop("path"))
    session.out.record(
        {**made, "link": link},
        [("link", link), ("ends", made["expires_at"])],
        note="Anyone with the link can sign in as an operator: keep it private.",
    )


@command(
    app,
    "operator",
    examples=(
        "serve-app people operator ada@example.org --role finance --account acct_…",
        "serve-app people operator ada@example.org --none",
    ),
)
def operator(
    session: Session,
    email: Email,
    role: Annotated[str | None, typer.Option(metavar="ROLE", help="admin, support, finance or read-only.")] = None,
    account: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Staff account that the person has joined.", autocompletion=complete_account),
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove the role.")] = False,
) -> None:
    """Grant or remove access to the operator pages of the console. The person must sign in again."""
    if (role is None) != none or (account is None) != none:
        raise UsageError("use --role ROLE with --account ID, or --none")
    if role is not None and role not in OPERATOR_ROLES:
        raise UsageError(f"--role {role}: must be one of {', '.join(OPERATOR_ROLES)}")
    found = session.client.api_post("people", "operator", body={"email": email, "role": role, "account_id": account})
    session.out.record(found, [("email", found["email"]), ("role", found["role"] or "none")])


def _set_suspended(session: Session, email: str, suspended: bool) -> None:
    found = session.client.api_post("people", "suspend", body={"email": email, "suspended": suspended})
    session.out.record(found, [("email", found["email"]), ("status", "suspended" if found["suspended"] else "active")])


def _link(session: Session, console: str | None, path: str) -> str:
    return (console or f"{session.connection.url.removesuffix('/v1')}/console").rstrip("/") + path
