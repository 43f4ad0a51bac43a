"""The shell completes ids of the service, within a second or not at all, and never with an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serve_app.cli import completion
from serve_app.cli.__main__ import main

from .conftest import Run
from .fake_service import OPERATOR_KEY, FakeService
from .local_http import Answer, Hang

Complete = Callable[[str], list[str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complete:
    """Returns what bash offers for a command line whose last word is incomplete."""

    def complete(line: str) -> list[str]:
        capsys.readouterr()
        words = line.split(" ")
        with monkeypatch.context() as patch:
            patch.setenv("_SERVE_APP_COMPLETE", "complete_bash")
            patch.setenv("COMP_WORDS", line)
            patch.setenv("COMP_CWORD", str(len(words) - 1))
            with pytest.raises(SystemExit):
                main([])
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out.split()

    return complete


@pytest.fixture
def account(service: FakeService, run: Run) -> str:
    run("accounts", "create", "Research")
    run("accounts", "create", "Sales")
    run("keys", "create", "acct_2")
    service.usage = [{"key_id": "key_9", "account_id": "acct_1"}]
    return "acct_1"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("serve-app accounts show ", ["acct_1", "acct_2"]),
        ("serve-app accounts show acct_2", ["acct_2"]),
        ("serve-app accounts show x", []),
        ("serve-app keys create ", ["acct_1", "acct_2"]),
        ("serve-app requests list --account ", ["acct_1", "acct_2"]),
        ("serve-app requests list --account acct_2 --key ", ["key_1"]),
        ("serve-app keys revoke ", ["key_9"]),
        ("serve-app models show svc-c", ["svc-chat", "svc-coder"]),
        ("serve-app usage --model svc-co", ["svc-coder"]),
        ("serve-app requests list --status ", ["completed", "cancelled", "failed"]),
        ("serve-app accounts list -o ", ["wide", "json", "yaml", "name"]),
    ],
)
def test_ids_come_from_the_service(account: str, complete: Complete, line: str, offered: list[str]) -> None:
    assert complete(line) == offered


def test_people_are_completed_by_their_address(service: FakeService, account: str, complete: Complete) -> None:
    found = {"data": [{"email": "ada@example.org", "name": "Ada"}], "invitations": []}
    service.next.extend([None, Answer(200, found), Answer(200, {"data": [], "invitations": []})])
    assert complete("serve-app people suspend a") == ["ada@example.org"]


def test_a_service_that_the_command_line_names_is_asked(
    service: FakeService, account: str, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERVE_APP_URL")
    assert complete(f"serve-app accounts show --url {service.url} acct_1") == ["acct_1"]
    assert complete(f"serve-app --url {service.url} accounts show acct_1") == ["acct_1"]


def test_an_unreachable_service_offers_nothing(
    service: FakeService, account: str, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_APP_OPERATOR_KEY", f"{OPERATOR_KEY}x")
    assert complete("serve-app accounts show ") == []
    monkeypatch.setenv("SERVE_APP_URL", "http://127.0.0.1:9")
    assert complete("serve-app accounts show ") == []
    monkeypatch.setenv("SERVE_APP_URL", "no address")
    assert complete("serve-app accounts show ") == []
    monkeypatch.delenv("SERVE_APP_OPERATOR_KEY")
    assert complete("serve-app accounts show ") == []


def test_a_service_that_does_not_answer_is_given_up(
    service: FakeService, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "PATIENCE_S", 0.05)
    service.next.append(hang := Hang())
    assert complete("serve-app accounts show ") == []
    hang.release.set()


def test_what_came_before_the_service_fell_silent_is_offered(
    service: FakeService, account: str, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "PAGE_SIZE", 1)
    monkeypatch.setattr(completion, "PATIENCE_S", 0.5)
    service.next.extend([None, hang := Hang()])
    assert complete("serve-app accounts show ") == ["acct_1"]
    hang.release.set()
