"""Keys, usage, models and the ledger's check."""

import pytest

from .conftest import Run
from .fake_service import PROBLEM, FakeService
from .local_http import Drop


@pytest.fixture
def account(service: FakeService, run: Run) -> str:
    return run("accounts", "create", "Research", "--json").json["id"]


def test_a_new_key_is_shown(service: FakeService, run: Run, account: str) -> None:
    key = run("keys", "create", account, "--json").json
    assert key["key"].startswith("sk-")
    assert key["id"] == "key_1"
    assert service.requests[-1].body == {}


def test_creating_a_key_is_never_repeated_automatically(service: FakeService, run: Run, account: str) -> None:
    service.next.append(Drop(after_work=True))
    lost = run("keys", "create", account)
    assert lost.code == 1
    assert "check before you repeat" in lost.error_line
    assert len(service.keys) == 1


def test_a_new_key_for_people_says_to_keep_it(service: FakeService, run: Run, account: str) -> None:
    out = run("keys", "create", account, "--name", "laptop").out
    assert "sk-0123456789abcdef" in out
    assert "can't be shown again" in out
    assert service.requests[-1].body == {"name": "laptop"}


def test_listing_keys_shows_no_key(service: FakeService, run: Run, account: str) -> None:
    assert f"serve-app keys create {account}" in run("keys", "list", account).out
    run("keys", "create", account, "--name", "laptop")
    assert [key["id"] for key in run("keys", "list", account, "--json").json["data"]] == ["key_1"]
    table = run("keys", "list", account).out
    assert "laptop" in table
    assert "sk-0123456789abcdef" not in table


def test_revoking_a_key(service: FakeService, run: Run, account: str) -> None:
    run("keys", "create", account)
    assert run("keys", "revoke", "key_1", "--json").json["status"] == "revoked"
    assert "revoked" in run("keys", "revoke", "key_1").out
    assert run("keys", "revoke", "key_9").code == 1


def test_usage_sends_every_filter(service: FakeService, run: Run) -> None:
    options = "--account acct_1 --key key_1 --model svc-chat --tag ci"
    options += " --from 2026-11-01 --to 2026-11-30 --group-by day,account"
    assert run("usage", *options.split(), "--json").json == {"data": service.usage}
    assert service.requests[-1].query == {
        "account": "acct_1",
        "key": "key_1",
        "model": "svc-chat",
        "tag": "ci",
        "from": "2026-11-01",
        "to": "2026-11-30",
        "group_by": "day,account",
    }


def test_usage_for_people_shows_the_groups_and_a_total(service: FakeService, run: Run) -> None:
    lines = run("usage").out.splitlines()
    assert lines[0].split()[:2] == ["day", "model"]
    assert lines[1].split() == ["2026-11-02", "svc-chat", "0.012345678", "1,200", "34,000", "12,000", "5,600"]
    assert lines[-1] == "total: 1,200 requests, 0.012345678 charged"
    assert service.requests[-1].query == {"group_by": "day,model"}


def test_the_total_of_large_charges_is_exact(service: FakeService, run: Run) -> None:
    [row] = service.usage
    service.usage = [row | {"charged": "123456789.123456789"}, row | {"charged": "0.000000001"}]
    lines = run("usage").out.splitlines()
    assert lines[1].split()[2] == "123456789.123456789"
    assert lines[-1] == "total: 2,400 requests, 123456789.123456790 charged"


def test_no_usage_is_reported(service: FakeService, run: Run) -> None:
    service.usage = []
    assert run("usage").out == "Nothing was used.\n"


@pytest.mark.parametrize(
    "options",
    [
        ["--group-by", "hour"],
        ["--group-by", ","],
        ["--from", "yesterday"],
        ["--to", "2026-13-01"],
        ["--from", "2026-11-02", "--to", "2026-11-01"],
    ],
)
def test_invalid_usage_options_are_refused_before_anything_is_sent(
    service: FakeService, run: Run, options: list[str]
) -> None:
    assert run("usage", *options).code == 2
    assert service.requests == []


def test_models_shows_backends_and_prices(service: FakeService, run: Run) -> None:
    assert run("models", "--json").json == run("models", "list", "--json").json == {"data": service.models}
    row = next(line for line in run("models").out.splitlines() if line.startswith("svc-coder"))
    shown = ["svc-coder", "smollm2", "100%", "ready", "0.27", "0.07", "1.10"]
    assert row.split() == shown
    row = next(line for line in run("models", "-o", "wide").out.splitlines() if line.startswith("svc-coder"))
    assert row.split() == [*shown, "2", "RUNNING", "config.yaml"]


def test_a_clean_ledger(service: FakeService, run: Run) -> None:
    line = "ok: 1,234 journal entries add up; 3 accounts, 56 requests, grants, budgets and the audit log agree\n"
    assert run("ledger", "check").out == line
    checked = run("ledger", "check", "--json")
    assert (checked.code, checked.json["ok"]) == (0, True)


def test_a_ledger_that_does_not_add_up_is_exit_code_1(service: FakeService, run: Run) -> None:
    service.problems = [PROBLEM]
    table, document = run("ledger", "check"), run("ledger", "check", "--json")
    assert (table.code, document.code) == (1, 1)
    assert table.out.splitlines()[1].split() == ["entry-7", "unbalanced", "postings", "sum", "to", "3"]
    assert document.json["problems"] == service.problems
