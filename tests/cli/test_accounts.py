"""Accounts: what the commands ask of the service and what they show."""

import pytest

from serve_app.contracts.limits import ACCOUNT_LIMITS

from .conftest import Run
from .fake_service import FakeService
from .local_http import Answer, Drop


@pytest.fixture
def account(service: FakeService, run: Run) -> str:
    return run("accounts", "create", "Research", "--credit", "5", "--json").json["id"]


def test_create_opens_an_account_with_funds(service: FakeService, run: Run) -> None:
    created = run("accounts", "create", "Research", "--credit", "5", "--json")
    assert created.code == 0
    assert created.json["id"] == "acct_1"
    assert created.json["balance"] == "5"
    assert service.requests[-1].body == {"name": "Research", "credit": "5", "kind": "top_up"}


def test_create_for_people_names_the_next_step(service: FakeService, run: Run) -> None:
    created = run("accounts", "create", "Research", "--credit", "5", "--grant")
    assert "5 USD" in created.out
    assert "serve-app keys create acct_1" in created.out
    assert service.requests[-1].body["kind"] == "grant"


def test_create_sets_limits_that_are_given_and_leaves_the_others_out(service: FakeService, run: Run) -> None:
    run("accounts", "create", "Research", "--rpm", "60", "--tpm", "default", "--json")
    assert service.requests[-1].body == {"name": "Research", "rpm": 60}


def test_show_gives_money_as_the_service_wrote_it(service: FakeService, run: Run, account: str) -> None:
    shown = run("accounts", "show", account, "--json").json
    assert (shown["balance"], shown["granted"], shown["topped_up"], shown["held"]) == ("5", "0", "5", "0.001")
    assert set(shown["usage"]) == {"requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charged"}


def test_show_marks_limits_that_are_defaults(service: FakeService, run: Run, account: str) -> None:
    run("accounts", "limits", account, "--rpm", "60")
    lines = run("accounts", "show", account).out.splitlines()
    assert any(line.split() == ["rpm", "60"] for line in lines)
    assert any(line.split() == ["tpm", "200,000", "(default)"] for line in lines)


def test_show_has_what_the_present_load_leaves_of_a_limit(service: FakeService, run: Run, account: str) -> None:
    shown = run("accounts", "show", account, "--json").json
    service.next.append(Answer(200, {**shown, "effective": {**shown["limits"], "tpm": 4000}}))
    lines = [" ".join(line.split()) for line in run("accounts", "show", account).out.splitlines()]
    assert "tpm 200,000 (default), 4,000 under the current load" in lines
    assert "rpm 600 (default)" in lines


def test_show_has_what_can_be_spent_and_what_expires(service: FakeService, run: Run, account: str) -> None:
    shown = run("accounts", "show", account, "--json").json
    expiring = [{"expires_at": "2026-12-01T00:00:00Z", "left": "1.50"}]
    service.next.append(Answer(200, {**shown, "available": "4.25", "expiring": expiring}))
    lines = [" ".join(line.split()) for line in run("accounts", "show", account).out.splitlines()]
    assert "balance 4.25 USD" in lines
    assert "expiring 1.50 USD at 2026-12-01T00:00:00Z" in lines


def test_a_grant_without_a_response_reports_the_expiry_that_was_sent(
    service: FakeService, run: Run, account: str
) -> None:
    service.next.extend([Drop(after_work=True), Drop(), Drop()])
    lost = run("accounts", "credit", account, "2", "--grant", "--expires", "30d")
    meant = service.requests[-1].body["expires_at"]
    assert f"--expires {meant}" in lost.error_line
    assert service.requests[-1].headers["idempotency-key"] in lost.error_line


def test_list_follows_every_page(service: FakeService, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.cli.client.PAGE_SIZE", 2)
    for number in range(5):
        run("accounts", "create", f"team {number}")
    assert [a["name"] for a in run("accounts", "list", "--json").json["data"]] == [f"team {n}" for n in range(5)]
    assert len(run("accounts", "list", "--limit", "3", "--json").json["data"]) == 3


def test_list_for_people_has_a_row_for_each_account(service: FakeService, run: Run, account: str) -> None:
    lines = run("accounts", "list").out.splitlines()
    assert lines[0].split()[:3] == ["id", "name", "status"]
    assert lines[1].split()[:4] == ["acct_1", "Research", "active", "5"]


def test_an_empty_list_says_what_to_do(service: FakeService, run: Run) -> None:
    assert "serve-app accounts create" in run("accounts", "list").out
    assert run("accounts", "list", "--json").json == {"data": []}


def test_a_long_name_is_not_cut_in_a_pipe(service: FakeService, run: Run) -> None:
    name = "a long name " * 20
    run("accounts", "create", name)
    assert name.strip() in run("accounts", "list").out


def test_a_name_can_not_send_codes_to_the_terminal(service: FakeService, run: Run) -> None:
    run("accounts", "create", "\x1b[31mred\nnew line")
    out = run("accounts", "list").out
    assert "\x1b" not in out
    assert "\\x1b[31mred\\nnew line" in out


def test_credit_adds_funds_with_a_fresh_idempotency_key(service: FakeService, run: Run, account: str) -> None:
    assert run("accounts", "credit", account, "2.5", "--json").json["topped_up"] == "7.5"
    assert run("accounts", "credit", account, "1", "--grant", "--memo", "sorry", "--json").json["granted"] == "1"
    first, second = service.requests[-2:]
    assert first.body == {"amount": "2.5", "kind": "top_up"}
    assert second.body == {"amount": "1", "kind": "grant", "memo": "sorry"}
    assert len(first.headers["idempotency-key"]) >= 32
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]


def test_a_credit_is_repeated_after_a_lost_response_and_posted_once(
    service: FakeService, run: Run, account: str
) -> None:
    service.next.append(Drop(after_work=True))
    assert run("accounts", "credit", account, "2", "--json").json["balance"] == "7"
    first, second = service.requests[-2:]
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_a_credit_without_a_response_reports_how_to_repeat_it(service: FakeService, run: Run, account: str) -> None:
    service.next.extend([Drop(after_work=True), Drop(), Drop()])
    lost = run("accounts", "credit", account, "2")
    assert lost.code == 1
    key = service.requests[-1].headers["idempotency-key"]
    assert f"--idempotency-key {key}" in lost.error_line
    assert run("accounts", "credit", account, "2", "--idempotency-key", key, "--json").json["balance"] == "7"


def test_create_is_repeated_after_a_lost_response_and_opens_one_account(service: FakeService, run: Run) -> None:
    service.next.append(Drop(after_work=True))
    assert run("accounts", "create", "Research", "--credit", "5", "--json").json["balance"] == "5"
    assert len(service.accounts) == 1


@pytest.mark.parametrize("amount", ["0", "0.0", "five", "NaN", "Infinity", "0.0000000001", "1e-10", "--", ""])
def test_an_invalid_amount_is_refused_before_anything_is_sent(
    service: FakeService, run: Run, account: str, amount: str
) -> None:
    sent = len(service.requests)
    assert run("accounts", "credit", account, amount).code == 2
    assert len(service.requests) == sent


def test_an_amount_in_scientific_notation_is_sent_plain(service: FakeService, run: Run, account: str) -> None:
    run("accounts", "credit", account, "1e2")
    assert service.requests[-1].body["amount"] == "100"


def test_limits_sends_only_what_is_given(service: FakeService, run: Run, account: str) -> None:
    changed = run("accounts", "limits", account, "--rpm", "30", "--tpm", "5000", "--concurrency", "2", "--json").json
    assert changed["limits"] == {"rpm": 30, "tpm": 5000, "concurrency": 2}
    run("accounts", "limits", account, "--tpm", "6000")
    assert service.requests[-1].body == {"tpm": 6000}


@pytest.mark.parametrize("form", [["--rpm", "default"], ["--default", "rpm"]])
def test_limits_can_go_back_to_the_default(service: FakeService, run: Run, account: str, form: list[str]) -> None:
    run("accounts", "limits", account, "--rpm", "30", "--tpm", "5000")
    changed = run("accounts", "limits", account, *form, "--json").json
    assert changed["contract"] == {"rpm": None, "tpm": 5000, "concurrency": None}
    assert changed["limits"]["rpm"] == 600


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--rpm", "0"],
        ["--rpm", "-1"],
        ["--rpm", "1.5"],
        ["--default", "rps"],
        ["--rpm", "1", "--default", "rpm"],
        ["--weight", "0"],
        ["--weight", "1000001"],
    ],
)
def test_limits_that_make_no_sense_are_usage_errors(
    service: FakeService, run: Run, account: str, options: list[str]
) -> None:
    sent = len(service.requests)
    assert run("accounts", "limits", account, *options).code == 2
    assert len(service.requests) == sent


@pytest.mark.parametrize("limit", ACCOUNT_LIMITS)
def test_each_limit_of_the_contract_is_an_option(service: FakeService, run: Run, account: str, limit: str) -> None:
    run("accounts", "limits", account, f"--{limit}", "1000000")
    assert service.requests[-1].body == {limit: 1_000_000}
    run("accounts", "limits", account, "--default", limit)
    assert service.requests[-1].body == {limit: None}


def test_suspend_and_resume(service: FakeService, run: Run, account: str) -> None:
    assert run("accounts", "suspend", account, "--json").json["status"] == "suspended"
    assert run("accounts", "resume", account, "--json").json["status"] == "active"
    run("accounts", "suspend", account)
    assert run("accounts", "suspend", account, "--resume", "--json").json["status"] == "active"


def test_an_id_can_not_reach_another_route(service: FakeService, run: Run) -> None:
    service.next.append(Answer(404, {"error": {"message": "there is no account", "code": "account_not_found"}}))
    run("accounts", "show", "../keys?x=1")
    assert service.requests[-1].path == "/admin/accounts/..%2Fkeys%3Fx%3D1"
