"""An operator's commands on the service itself: what they set is in the ledger, and what they show is what is there."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from serve_app.contracts.books import Outcome, Refusal, Settlement, SettlementRejected
from serve_app.contracts.money import Price
from tests.accounting.books import settlement
from tests.gateway.world import NANO, OPERATOR

from .conftest import Run
from .real_service import RealService


@pytest.fixture
def account(real: RealService) -> str:
    return real.world.account_id


def days(text: str) -> float:
    """From now until an ISO time."""
    return (datetime.fromisoformat(text) - datetime.now(UTC)) / timedelta(days=1)


def lines(text: str) -> dict[str, str]:
    """A record's fields, as people see them."""
    return dict(re.findall(r"^ *(.+?) {3,}(.*)$", text, re.MULTILINE))


def test_a_trial_account_opens_with_a_grant_that_expires_and_a_small_share(real: RealService, run: Run) -> None:
    options = ["--credit", "2", "--grant", "--expires", "30d", "--weight", "50", "--rpm", "60"]
    made = run("accounts", "create", "Trial", *options, "--json").json
    assert (made["granted"], made["weight"], made["limits"]["rpm"]) == ("2.00", 50, 60)
    assert days(made["expiring"][0]["expires_at"]) == pytest.approx(30, abs=0.01)
    [grant] = real.world.ledger.grants(made["id"])
    assert (grant.amount, grant.left) == (2 * NANO, 2 * NANO)
    shown = lines(run("accounts", "show", made["id"]).out)
    assert shown["weight"] == "50"
    assert shown["expiring"].startswith("2.00 USD at ")
    assert shown["tpm"] == "1,000,000 (default)"


def test_weight_and_limits_go_back_to_the_default(real: RealService, run: Run, account: str) -> None:
    assert run("accounts", "limits", account, "--weight", "250", "--rpm", "7", "--json").json["weight"] == 250
    freed = run("accounts", "limits", account, "--weight", "default", "--json").json
    assert (freed["weight"], freed["contract"]["weight"], freed["limits"]["rpm"]) == (100, None, 7)


def test_grants_are_listed_with_what_is_left(real: RealService, run: Run, account: str) -> None:
    assert "serve-app accounts credit" in run("accounts", "grants", account).out
    run("accounts", "credit", account, "1.5", "--grant", "--expires", "2099-12-31", "--memo", "sorry")
    run("accounts", "credit", account, "3", "--grant")
    grants = run("accounts", "grants", account, "--json").json["data"]
    assert [(g["amount"], g["left"], g["expires_at"], g["memo"]) for g in grants] == [
        ("1.50", "1.50", "2100-01-01T00:00:00Z", "sorry"),
        ("3.00", "3.00", None, ""),
    ]
    assert "sorry" in run("accounts", "grants", account).out


def test_a_grant_that_was_a_mistake_is_taken_back(real: RealService, run: Run, account: str) -> None:
    run("accounts", "credit", account, "1.5", "--grant")
    [grant] = run("accounts", "grants", account, "--json").json["data"]
    number = str(grant["id"])
    for wrong in ([number], [number, "--memo", " "], ["0", "--memo", "m"], ["x", "--memo", "m"]):
        assert run("accounts", "take-back", account, *wrong).code == 2
    taken = run("accounts", "take-back", account, number, "--memo", "wrong account", "--json").json
    assert (taken["granted"], taken["balance"]) == ("0.00", "1.00")
    again = run("accounts", "take-back", account, number, "--memo", "wrong account", "--json")
    assert (again.code, again.error["status"]) == (1, 422)
    assert "nothing is left" in again.error["message"]
    assert "amount: -1.50" in run("audit", "list", "--limit", "1").out
    assert real.world.books_balance()


def test_a_top_up_can_not_expire(real: RealService, run: Run, account: str) -> None:
    refused = run("accounts", "credit", account, "5", "--expires", "30d")
    assert refused.code == 2
    assert "--grant" in refused.error_line
    assert real.world.balance == NANO


def test_corrections_take_and_give_with_a_memo(real: RealService, run: Run, account: str) -> None:
    assert run("accounts", "correct", account, "-0.25", "--memo", "twice", "--json").json["balance"] == "0.75"
    assert run("accounts", "correct", account, "0.5", "--memo", "outage", "--json").json["balance"] == "1.25"
    too_much = run("accounts", "correct", account, "-5", "--memo", "more than there is", "--json")
    assert (too_much.code, too_much.error["status"]) == (1, 422)
    assert "1.25" in too_much.error["message"]
    for wrong in (["-0.25"], ["-0.25", "--memo", " "], ["0", "--memo", "m"], ["x", "--memo", "m"]):
        assert run("accounts", "correct", account, *wrong).code == 2
    assert real.world.balance == NANO + NANO // 4
    assert real.world.books_balance()


def test_a_key_is_made_changed_and_freed_again(real: RealService, run: Run, account: str) -> None:
    terms = ["--model", "svc-coder", "--rpm", "30", "--budget", "2.50", "--per", "day", "--expires", "12h"]
    terms += ["--tag", "team-a", "--tag", "batch", "--address", "10.0.0.0/8", "--address", "203.0.113.7"]
    made = run("keys", "create", account, "--name", "ci", *terms, "--json").json
    assert made["key"].startswith("sk-")
    assert (made["models"], made["limits"]["rpm"], made["budget"], made["budget_period"]) == (
        ["svc-coder"], 30, "2.50", "day",
    )  # fmt: skip
    assert (made["tags"], made["addresses"]) == (["team-a", "batch"], ["10.0.0.0/8", "203.0.113.7/32"])
    assert days(made["expires_at"]) == pytest.approx(0.5, abs=0.01)

    changed = run("keys", "update", made["id"], "--model", "svc-chat", "--model", "svc-coder", "--tpm", "500", "--json")
    assert changed.json["models"] == ["svc-chat", "svc-coder"]
    assert changed.json["limits"] == {"rpm": 30, "tpm": 500, "concurrency": None}
    monthly = run("keys", "update", made["id"], "--budget", "20", "--per", "month", "--json").json
    assert (monthly["budget"], monthly["budget_period"]) == ("20.00", "month")
    assert monthly["tags"] == ["team-a", "batch"]
    retagged = run("keys", "update", made["id"], "--tag", "lab", "--address", "2001:db8::/48", "--json").json
    assert (retagged["tags"], retagged["addresses"]) == (["lab"], ["2001:db8::/48"])
    free = [
        "--tag",
        "none",
        "--address",
        "any",
        "--model",
        "any",
        "--rpm",
        "none",
        "--tpm",
        "none",
        "--budget",
        "none",
        "--expires",
        "never",
    ]
    freed = run("keys", "update", made["id"], *free, "--json").json
    assert (freed["models"], freed["budget"], freed["budget_period"], freed["expires_at"]) == (None,) * 4
    assert set(freed["limits"].values()) == {None}
    assert (freed["tags"], freed["addresses"]) == (None, None)


def test_keys_for_people_show_terms_and_status(real: RealService, run: Run, account: str) -> None:
    out = run("keys", "create", account, "--budget", "2.50", "--per", "day", "--model", "svc-chat", "--tag", "lab").out
    shown = lines(out)
    assert shown["budget"] == "2.50 per day"
    assert shown["spent"].startswith("0.00, renews at ")
    assert (shown["models"], shown["rpm"], shown["expires"]) == ("svc-chat", "the account's", "never")
    assert (shown["tags"], shown["addresses"]) == ("lab", "any")
    run("keys", "revoke", shown["id"])
    table = run("keys", "list", account).out
    assert "0.00 of 2.50 per day" in table
    assert "revoked" in table


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--budget", "5"], "--per"),
        (["--per", "day"], "--budget"),
        (["--budget", "5", "--per", "week"], "day or month"),
        (["--budget", "none", "--per", "day"], "cannot be combined"),
        (["--budget", "0", "--per", "day"], "above 0"),
        (["--rpm", "0"], "--rpm"),
        (["--rpm", "default"], "none"),
        (["--model", "any", "--model", "svc-chat"], "cannot be combined"),
        (["--tag", "none", "--tag", "a"], "cannot be combined"),
        (["--address", "any", "--address", "10.0.0.1"], "cannot be combined"),
        (["--expires", "tomorrow"], "--expires"),
        (["--expires", "2020-01-01"], "in the future"),
    ],
)
def test_invalid_terms_of_a_key_are_refused_before_anything_is_sent(
    real: RealService, run: Run, account: str, options: list[str], says: str
) -> None:
    refused = run("keys", "create", account, *options)
    assert refused.code == 2
    assert says in refused.error_line
    assert len(real.world.ledger.list_keys(account)) == 1


def test_an_update_of_nothing_is_a_usage_error(real: RealService, run: Run) -> None:
    assert run("keys", "update", "key_x").code == 2


def test_a_model_that_is_not_served_is_named_with_those_that_are(real: RealService, run: Run, account: str) -> None:
    refused = run("keys", "create", account, "--model", "svc-chta")
    assert refused.code == 1
    assert "svc-chta" in refused.error_line
    assert "svc-chat, svc-coder" in refused.error_line


def test_a_network_with_host_bits_is_refused_with_the_right_one(real: RealService, run: Run, account: str) -> None:
    refused = run("keys", "create", account, "--address", "10.0.0.5/8")
    assert refused.code == 1
    assert "write 10.0.0.0/8 to allow all of it, or 10.0.0.5" in refused.error_line


def test_usage_by_tag_shows_keys_without_one_and_no_total(real: RealService, run: Run, account: str) -> None:
    for number, tags in enumerate(([], ["--tag", "a", "--tag", "b"])):
        key = run("keys", "create", account, *tags, "--json").json
        real.world.ledger.settle([settlement(f"r{number}", account, key["id"])])
    out = run("usage", "--account", account, "--group-by", "tag").out
    assert [line.split()[:2] for line in out.splitlines()[1:4]] == [
        ["no", "tag"],
        ["a", "0.000000046"],
        ["b", "0.000000046"],
    ]
    assert "several tags" in out
    assert "total" not in out
    rows = run("usage", "--account", account, "--group-by", "tag", "--tag", "", "--json").json["data"]
    assert [(row["tag"], row["requests"]) for row in rows] == [("", 1)]
    file = run("usage", "export", "--account", account, "--group-by", "tag").out
    assert [line.split(",")[0] for line in file.splitlines()] == ["tag", "", "a", "b"]


def test_the_audit_log_names_who_did_what(
    real: RealService, run: Run, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("audit", "list").out == "There are no records yet.\n"
    run("accounts", "limits", account, "--rpm", "60", "--operator", "ada@desk")
    monkeypatch.setenv("SERVE_APP_OPERATOR", "grace@phone")
    run("accounts", "correct", account, "-0.5", "--memo", "twice")
    monkeypatch.delenv("SERVE_APP_OPERATOR")
    run("accounts", "suspend", account)
    records = run("audit", "list", "--json").json["data"]
    assert [record["action"] for record in records] == ["set_active", "correct", "set_limits"]
    users, grace, ada = (record["actor"].split()[0] for record in records)
    assert (ada, grace) == ("ada@desk", "grace@phone")
    assert re.fullmatch(r"\S+@\S+", users)
    assert all(record["request_id"] and record["address"] == "127.0.0.1" for record in records)
    table = run("audit", "list", "--limit", "2").out
    assert "amount: -0.50" in table
    assert "rpm" not in table
    assert OPERATOR not in table


def test_the_audit_log_is_read_over_pages(
    real: RealService, run: Run, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.cli.client.PAGE_SIZE", 2)
    for rpm in range(1, 8):
        run("accounts", "limits", account, "--rpm", rpm)
    new = [record["detail"]["rpm"]["is"] for record in run("audit", "list", "--json").json["data"]]
    assert new == [7, 6, 5, 4, 3, 2, 1]
    assert len(run("audit", "list", "--limit", "5", "--json").json["data"]) == 5
    assert run("audit", "list", "--account", "acct_none", "--json").json == {"data": []}


@pytest.mark.parametrize("name", ["x" * 101, "t\u00e4st", "a\nb"])
def test_a_name_that_a_header_can_not_carry_is_refused(real: RealService, run: Run, account: str, name: str) -> None:
    assert run("accounts", "suspend", account, "--operator", name).code == 2
    assert real.world.ledger.get_account(account).active


def test_a_user_with_an_unusual_name_can_still_operate(
    real: RealService, run: Run, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "zo\u00eb \x07" + "x" * 200)
    assert run("accounts", "suspend", account).code == 0
    [record] = run("audit", "list", "--json").json["data"]
    assert record["actor"].startswith("zo\\xeb ?xxx")


def test_the_check_covers_everything(real: RealService, run: Run) -> None:
    checked = run("ledger", "check")
    assert checked.code == 0
    assert "grants" in checked.out
    report = run("ledger", "check", "--json").json
    assert (report["ok"], report["accounts"], report["problems"]) == (True, 1, [])


@pytest.mark.parametrize(
    "command",
    ["accounts create", "accounts credit", "accounts correct", "accounts take-back", "accounts limits",
     "keys create", "keys update", "usage", "usage export", "audit list"],
)  # fmt: skip
def test_help_ends_with_examples(run: Run, command: str) -> None:
    out = run(*command.split(), "--help").out
    assert "--json" in out
    assert f"serve-app {command}" in out.partition("Examples:")[2]


def test_stuck_settlements_are_listed_and_settled_on_command(real: RealService, run: Run, account: str) -> None:
    assert run("ledger", "stuck").out == "Nothing is stuck.\n"
    ledger = real.world.ledger
    [key] = ledger.list_keys(account)
    sent = [
        Settlement(
            f"r{number}", account, key.key_id, "svc-chat", "fake", Price(1, 1, 1), 10, 0, 2, Outcome.COMPLETED, 1.0, 2.0
        )
        for number in range(120)
    ]
    ledger.keep_stuck([(one, SettlementRejected(one.request_id, Refusal.FAILED, "OperationalError")) for one in sent])
    gone = replace(sent[0], request_id="unknown", account_id="acct_none")
    ledger.keep_stuck([(gone, SettlementRejected("unknown", Refusal.ACCOUNT_NOT_FOUND, "no account"))])
    found = run("ledger", "stuck", "--json").json["data"]
    assert len(found) == 121
    assert (found[0]["id"], found[0]["refusal"], found[0]["tries"]) == ("r0", "failed", 1)
    assert found[0]["settlement"]["completion_tokens"] == 2
    assert "OperationalError" in run("ledger", "stuck").out

    assert run("ledger", "stuck", "--retry", "r0", "--retry", "r1").code == 0
    assert ledger.account_totals(account).requests == 2
    rest = run("ledger", "stuck", "--all", "--json")
    assert rest.code == 1
    assert [one["id"] for one in rest.json["data"]] == ["unknown"]
    assert ledger.account_totals(account).requests == 120
    assert {record["action"] for record in run("audit", "list", "--json").json["data"]} == {"retry_stuck"}
    assert run("ledger", "stuck", "--retry", "r0", "--all").code == 2
    assert run("ledger", "check").code == 0
