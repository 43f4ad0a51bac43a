"""`serve-app people …` on the service itself."""

from __future__ import annotations

import re

from serve_app.contracts import key_format, people
from serve_app.contracts.sign_in import FindSignInLink

from .conftest import Run
from .real_service import RealService


def test_a_person_is_invited_listed_suspended_and_resumed(real: RealService, run: Run) -> None:
    account = real.world.account_id
    assert f"serve-app people invite EMAIL {account}" in run("people", "list", account).out
    made = run("people", "invite", "ada@example.org", account, "--role", "member", "--json").json
    assert made["link"].startswith(f"{real.url}/console/invitations/")
    assert "path" not in made
    assert re.search(r"ada@example\.org +member +invited until", run("people", "list", account).out)
    digest = key_format.digest(made["link"].rpartition("/")[2])
    real.world.ledger.run(people.AcceptInvitation(digest, "Ada", "a hash"))
    assert re.search(r"ada@example\.org +member +active +Ada", run("people", "list", account).out)
    assert run("people", "suspend", "ada@example.org", "--json").json["suspended"] is True
    assert re.search(r"ada@example\.org +member +suspended +Ada", run("people", "list", account).out)
    assert run("people", "resume", "ada@example.org", "--json").json["suspended"] is False
    assert run("people", "suspend", "ada@example.org", "--json").json["suspended"] is True
    assert run("people", "suspend", "ada@example.org", "--resume", "--json").json["suspended"] is False


def test_a_person_gets_a_role_of_operators_and_loses_it(real: RealService, run: Run) -> None:
    made = run("people", "invite", "olga@example.org", real.world.account_id, "--json").json
    digest = key_format.digest(made["link"].rpartition("/")[2])
    real.world.ledger.run(people.AcceptInvitation(digest, "Olga", "a hash"))
    account = ("--account", real.world.account_id)
    given = run("people", "operator", "olga@example.org", "--role", "finance", *account, "--json").json
    assert given == {"email": "olga@example.org", "role": "finance"}
    person = real.world.ledger.run(people.FindPerson("olga@example.org"))
    assert person is not None
    assert person.operator_role == "finance"
    assert run("people", "operator", "olga@example.org", "--none", "--json").json["role"] is None
    assert "use --role ROLE with --account ID, or --none" in run("people", "operator", "olga@example.org").error_line
    wrong = run("people", "operator", "olga@example.org", "--role", "king", *account).error_line
    assert "must be one of admin" in wrong
    unknown = run("people", "operator", "no@example.org", "--role", "admin", *account).error_line
    assert "no person has the address" in unknown


def test_a_person_who_has_lost_password_or_codes_is_reset(real: RealService, run: Run) -> None:
    made = run("people", "invite", "rita@example.org", real.world.account_id, "--json").json
    digest = key_format.digest(made["link"].rpartition("/")[2])
    real.world.ledger.run(people.AcceptInvitation(digest, "Rita", "a hash"))
    assert re.search(r"one-time codes +off", run("people", "reset", "rita@example.org", "--codes-only").out)
    console = ("--console", "https://api.example/console")
    made = run("people", "reset", "rita@example.org", "--hours", "2", *console, "--json").json
    assert made["link"].startswith("https://api.example/console/reset/")
    person = real.world.ledger.run(people.FindPerson("rita@example.org"))
    assert person is not None
    assert person.password.startswith(people.RESET)
    assert "no person has the address" in run("people", "reset", "no@example.org").error_line


def test_an_invitation_is_revoked(real: RealService, run: Run) -> None:
    account = real.world.account_id
    made = run(
        "people", "invite", "ben@example.org", account, "--console", "https://api.example/console/", "--json"
    ).json
    assert made["link"].startswith("https://api.example/console/invitations/")
    assert run("people", "revoke", made["id"], "--json").json["revoked_at"]
    assert "ben@" not in run("people", "list", account).out


def test_what_is_wrong_is_one_line(real: RealService, run: Run) -> None:
    account = real.world.account_id
    assert "--role king: must be one of owner" in run("people", "invite", "a@b", account, "--role", "king").error_line
    assert "is not an e-mail address" in run("people", "invite", "nobody", account).error_line
    assert "no open invitation" in run("people", "revoke", "inv_none").error_line


def test_a_sign_in_link_leads_to_the_console_and_works_once(real: RealService, run: Run) -> None:
    made = run("people", "sign-in-link", real.world.account_id, "--json").json
    assert "/console/first/" in made["link"]
    digest = key_format.digest(made["link"].rpartition("/")[2])
    assert real.world.ledger.run(FindSignInLink(digest)) is not None
    assert "keep it private" in run("people", "sign-in-link", real.world.account_id).out
    assert real.world.ledger.run(FindSignInLink(digest)) is None, "the next one replaces it"
