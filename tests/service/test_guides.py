"""The commands of docs/guides, run in the order of this file, and the results that the guides promise.

The tests of this file go on where the one before them ended.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.contracts.books import Refusal, SettlementRejected
from serve_app.storage.spool import Spool
from tests.accounting.books import COST, Books, Clock, Ledger, settlement
from tests.service.harness import nano, until
from tests.service.operating.document import Command, left_over, sections
from tests.service.operating.ledgers import lose_and_restore, restore_to_a_moment, rotate
from tests.service.operating.operator import PAST, Operator, at_work
from tests.service.operating.stage import ROOT, Done, Step

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.long]

#: The commands by guide and section.
GUIDES = {path.stem: sections(path) for path in sorted((ROOT / "docs/guides").glob("*.md"))}
ROLL_OUT = sections(ROOT / "docs/lifecycle.md")["A roll-out"]
#: What can't run here, or is no command of the reader's.
NOT_RUN = {
    "make setup": "fetches and installs; `.ci/run` does it in a clean clone",
    "make engine-vllm": "six minutes and 3 GB; `make test-vllm` runs on it",
    "kubectl drain NODE --ignore-daemonsets --delete-emptydir-data": "needs Kubernetes; `make drill` is Ray's",
    "systemctl stop serve-app-gateway": "needs systemd; tests/cluster/test_bare_metal.py holds the units",
    "ray start": "named; `start-ray` and the launcher's files run it",
    "VACUUM FULL": "named: what PostgreSQL does",
    "ALTER ROLE … PASSWORD": "named: the whole command stands below it",
    "serve-app people invite ada@example.org STAFF_ID --role member": "needs a console; tests/cli/test_people.py",
    "serve-app models canary qwen:law --for svc-law --share 5": "needs vLLM with an adapter; tests/engine_contract",
    "python -m bench.fair_gate": "a simulation of minutes; tests/engine/test_gate_throughput.py",
    "serve-app people operator ada@example.org --role finance --account STAFF_ID": "needs a person who has joined",
}
#: Named in a table at the beginning; the service is started so when it was restored.
START_WITH_TLS = next(one for one in GUIDES["start"]["The state folder"] if one.text == "make serve TLS=1")
RAN: set[tuple[str, str]] = set()  # guides and sections
PAST_REQUESTS = 3


@pytest.fixture(scope="module")
def operator(model_path: Path) -> Iterator[Operator]:
    with at_work(model_path, NOT_RUN) as working:
        yield working


def commands_of(guide: str, *titles: str) -> list[Command]:
    """The commands of the sections with these titles, else of the whole guide."""
    RAN.update((guide, title) for title in titles or GUIDES[guide])
    return [command for title in titles or GUIDES[guide] for command in GUIDES[guide][title]]


def run(operator: Operator, guide: str, steps: dict[str, Any] | None = None, *titles: str) -> None:
    operator.run(commands_of(guide, *titles), steps or {})


def test_start_and_size_the_service(operator: Operator) -> None:
    """The service has had requests some months ago."""
    then = PAST.timestamp()
    with contextlib.closing(Ledger(operator.ledger_url, now=Clock(then), currency="USD")) as ledger:
        books = operator.past = Books(ledger)
        ledger.settle([books.settlement(f"past-{n}", finished_at=then, started_at=then) for n in range(PAST_REQUESTS)])

    def looks_well(done: Done) -> None:
        assert {line.split()[0] for line in done.out.splitlines()} == {"ok"}

    run(
        operator,
        "start",
        {
            "make serve": Step(),
            "make serve TLS=1": None,
            "serve-app doctor": looks_well,
            "serve-app size": lambda done: "replicas" in done.out,
        },
    )
    secrets = operator.home / "secrets"
    assert {path.name for path in secrets.iterdir()} >= {"operator-key", "secret-key", "ray-token", "first-api-key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {0o600}
    assert (operator.home / "logs" / "ray").is_dir()
    reply = operator.service.chat(operator.service.first_key, max_tokens=1)
    assert reply.is_success, reply.text


def test_configure_the_service(operator: Operator) -> None:
    def lower_limit() -> None:
        config = operator.config
        limiter = next(one for one in config["applications"][0]["deployments"] if one["name"] == "Limiter")
        limiter["user_config"]["contract"]["rpm"] = 599
        operator.write_config(config)

    def applies(_: Done) -> None:
        first = operator.service.first_key
        until(lambda: operator.chat(first).headers["x-ratelimit-limit-requests"] == "599")

    before = operator.service.pids("gateway:Gateway")
    run(operator, "configure", {"serve deploy config.yaml": Step(applies, lower_limit)})
    assert operator.service.pids("gateway:Gateway") == before


def test_add_a_model(operator: Operator) -> None:
    run(operator, "add-a-model", {"serve-app models fetch": lambda done: "no model of the hub" in done.out})
    run(operator, "vllm")


def test_add_accounts_and_keys(operator: Operator) -> None:
    service = operator.service

    def created(done: Done) -> None:
        operator.account_id = done.json["id"]
        assert nano(done.json["balance"]) == nano("5")

    def limited(_: Done) -> None:
        view = operator.account()
        assert view["limits"] | {"weight": view["weight"]} == dict.fromkeys(
            ("rpm", "tpm", "concurrency", "weight"), 1000
        )

    def suspended(done: Done) -> None:
        assert operator.account()["status"] == ("active" if "--resume" in done.text else "suspended")

    def works(done: Done) -> None:
        operator.key, operator.key_id = done.json["key"], done.json["id"]
        assert operator.chat().status_code == 200

    def narrowed(_: Done) -> None:
        until(lambda: operator.chat(model="svc-coder").status_code == 422)
        assert operator.chat().status_code == 200

    def bounded(_: Done) -> None:
        keys = service.admin("GET", f"/admin/accounts/{operator.account_id}/keys")["data"]
        [key] = [one for one in keys if one["id"] == operator.key_id]
        assert (key["tags"], key["addresses"]) == (["team-a", "batch"], ["127.0.0.1/32", "10.0.0.0/8"])
        assert operator.chat().status_code == 200

    run(
        operator,
        "accounts-and-keys",
        {
            "serve-app accounts create": created,
            "serve-app accounts show": lambda done: done.json["effective"],
            "serve-app accounts limits": limited,
            "serve-app accounts suspend": suspended,
            "serve-app keys create": works,
            "serve-app keys update KEY_ID --model": narrowed,
            "serve-app keys update KEY_ID --tag": bounded,
            "serve-app keys revoke": lambda _: until(lambda: operator.chat().status_code == 401),
        },
    )
    operator.new_key()


def test_give_credit_and_correct_charges(operator: Operator) -> None:
    paid = nano(operator.account()["topped_up"])  # requests have been billed

    def credited(done: Done) -> None:
        view = operator.account()
        granted = nano("10") if "--grant" in done.text else 0
        assert (nano(view["topped_up"]), nano(view["granted"])) == (paid + nano("10"), granted)

    def granted(done: Done) -> None:
        [grant] = operator.service.admin("GET", f"/admin/accounts/{operator.account_id}/grants")["data"]
        operator.grant_id = str(grant["id"])
        assert operator.grant_id in done.out

    run(
        operator,
        "credit",
        {
            "serve-app accounts credit": credited,
            "serve-app accounts grants": granted,
            "serve-app accounts correct": lambda _: nano(operator.account()["topped_up"]) == paid + nano("5"),
            "serve-app accounts take-back": lambda _: nano(operator.account()["granted"]) == 0,
        },
    )


def test_report_and_export_usage(operator: Operator) -> None:
    def exported(_: Done) -> None:
        with (operator.folder / "november.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) == PAST_REQUESTS

    run(
        operator,
        "usage",
        {"serve-app usage --group-by": lambda done: "svc-chat" in done.out, "serve-app usage export": exported},
    )


def test_operators(operator: Operator) -> None:
    run(operator, "operators", {"serve-app audit list": lambda done: "revoke_key" in done.out})


def test_check_and_archive_the_books(operator: Operator) -> None:
    def archived(_: Done) -> None:
        assert list((operator.folder / "archive").iterdir())
        assert operator.requests_in_all() >= PAST_REQUESTS
        assert operator.ledger_url.endswith("ledger.db")

    run(
        operator,
        "check-the-books",
        {
            "serve-app ledger check": lambda done: done.out.startswith("ok"),
            "serve-app ledger archive": archived,
            "serve-app ledger check --archive": lambda _: None,
        },
    )


def test_a_new_backend(operator: Operator) -> None:
    """The commands of lifecycle.md. `chat-v1` was there before, without a replica."""
    service, shipped = operator.service, operator.config["applications"][1]
    scaling = shipped["deployments"][0]["autoscaling_config"] | {"min_replicas": 0, "initial_replicas": 0}
    body = {"name": "chat-v1", "args": shipped["args"], "options": {"autoscaling_config": scaling}}
    service.admin("POST", "/admin/backends", body)

    def share(backend: str) -> float:
        weights = {one["name"]: one["weight"] for one in service.admin("GET", "/admin/models/svc-chat")["backends"]}
        return weights.get(backend, 0) / sum(weights.values())

    def backends() -> set[str]:
        return {one["name"] for one in service.admin("GET", "/admin/backends")["data"]}

    def shared(done: Done) -> None:
        assert round(100 * share("chat-v2")) == int(done.text.split()[-1])

    operator.run(
        (command for command in ROLL_OUT if command.language == ""),
        {
            "serve-app models deploy chat-v2": lambda done: "ready" in done.out,
            "serve-app models canary": shared,
            "serve-app models list": lambda done: "chat-v2" in done.out,
            "serve-app models promote": lambda _: until(lambda: operator.backend() == "chat-v2"),
            "serve-app models retire": lambda _: "chat-v1" not in backends(),
            "serve-app models rollback": lambda _: until(lambda: operator.backend() == "smollm2"),
            "serve-app models weights": lambda _: share("smollm2") == 1,
        },
    )
    run(operator, "shards")
    run(operator, "pressure")


def test_when_something_dies(operator: Operator) -> None:
    service = operator.service

    def kill() -> None:
        victims = [pid for part in ("Gateway", "Limiter", "Accounting") for pid in service.pids(f"gateway:{part}")]
        assert len(victims) == 3
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        until(operator.is_served)

    def change(amount: int) -> None:
        with operator.ledger() as ledger, ledger._database.aside() as connection:
            statement = f"UPDATE accounts SET topped_up = topped_up + {amount} WHERE id = '{operator.past.account_id}'"
            connection.exec_driver_sql(statement)

    def found(done: Done) -> None:
        assert operator.past.account_id in done.out
        change(-1)

    def suspend() -> None:
        service.admin("POST", f"/admin/accounts/{operator.account_id}/suspend")
        until(lambda: operator.chat().status_code == 401)

    def bad_backend() -> None:
        service.admin("POST", "/admin/models/svc-chat/canary", {"backend": "chat-v2", "share": 100})
        until(lambda: operator.backend() == "chat-v2")

    run(
        operator,
        "recover",
        {
            "serve-app ledger check": Step(lambda done: done.out.startswith("ok"), kill),
            "serve-app ledger stuck": lambda done: done.out == "Nothing is stuck.\n",
            "serve-app ledger check --database": lambda done: done.out.startswith("ok"),
            "serve-app ledger check --full": Step(found, lambda: change(1), code=1),
            "serve-app cluster certificates": Step(
                lambda done: "head.example" in done.out,
                lambda: operator.shell("serve-app cluster certificates --out tls head.example,10.0.0.2"),
            ),
            "serve-app accounts resume": Step(lambda _: until(lambda: operator.chat().is_success), suspend),
            "serve-app keys create": lambda done: bool(re.search(r"sk-\S+", done.out)),
            "serve-app models rollback": Step(lambda _: until(lambda: operator.backend() == "smollm2"), bad_backend),
        },
        "Recover from a failure",
    )


def test_what_a_lost_machine_leaves(operator: Operator) -> None:
    spool = Spool(operator.folder / "lost-machine/spool", "gateway-gone")
    for number in range(2):
        spool.append(settlement(f"left-{number}", operator.account_id, operator.key_id, finished_at=time.time()))
    spool.close()
    before = operator.account()["usage"]["requests"]
    run(
        operator,
        "recover",
        {"mv": lambda _: until(lambda: operator.account()["usage"]["requests"] == before + 2)},
        "Spool of a lost machine",
    )
    until(lambda: not list((operator.home / "spool").glob("gateway-gone*")))


def test_what_could_not_be_settled(operator: Operator) -> None:
    stuck = [settlement(f"stuck-{n}", operator.account_id, operator.key_id, finished_at=time.time()) for n in (1, 2)]
    with operator.ledger() as ledger:
        ledger.keep_stuck([(one, SettlementRejected(one.request_id, Refusal.FAILED, "disk full")) for one in stuck])
    balance = nano(operator.account()["balance"])
    run(
        operator,
        "recover",
        {
            "serve-app ledger stuck --retry": lambda _: nano(operator.account()["balance"]) == balance - COST,
            "serve-app ledger stuck --all": lambda _: nano(operator.account()["balance"]) == balance - 2 * COST,
        },
        "Stuck settlements",
    )


def test_drain(operator: Operator) -> None:
    service = operator.service
    chat: dict[str, Any] = {"model": "svc-chat", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 150}
    streams: list[Any] = []

    def begin() -> None:
        streams.append(
            service.client(operator.key).chat.completions.create(**chat, stream=True, extra_body={"ignore_eos": True})
        )
        next(streams[0])

    def finished(_: Done) -> None:
        until(lambda: operator.chat().status_code == 401)
        *_, last = streams[0]
        assert last.choices[0].finish_reason == "length"
        service.admin("POST", f"/admin/accounts/{operator.account_id}/resume")
        until(lambda: operator.chat().is_success)

    run(
        operator,
        "drain",
        {
            "serve-app models promote": lambda _: operator.backend() == "smollm2",
            "serve-app accounts suspend": Step(finished, begin),
        },
    )


def test_upgrade(operator: Operator) -> None:
    run(
        operator,
        "upgrade",
        {"serve-app ledger backup": lambda done: "journal entries" in done.out, "serve-app doctor": Step()},
    )


def test_back_up_and_restore(operator: Operator) -> None:
    *titles, _ = GUIDES["back-up"]
    lose_and_restore(operator, commands_of("back-up", *titles), START_WITH_TLS)


def test_restore_postgresql_to_a_point_in_time(operator: Operator) -> None:
    restore_to_a_moment(operator, commands_of("back-up", "Restore PostgreSQL to a point in time"))


def test_rotate_keys_and_secrets(operator: Operator) -> None:
    rotate(operator, commands_of("rotate-secrets"))


def test_investigate_a_request(operator: Operator) -> None:
    def told(done: Done) -> None:
        assert operator.chat_id in done.out
        assert operator.account_id in done.out

    run(
        operator,
        "investigate",
        {"serve-app requests show": told, "serve-app top": lambda done: "limiters 1/1" in done.out},
    )


def test_check_every_node(operator: Operator) -> None:
    run(operator, "check-a-cluster", {"serve-app doctor --cluster": lambda done: "FAIL" not in done.out})


def test_every_command_has_run_or_is_listed_with_a_reason(operator: Operator) -> None:
    """After all others of this file."""
    assert {(guide, title) for guide, parts in GUIDES.items() for title in parts} == RAN
    parts = {f"{guide}: {title}": part for guide, parts in GUIDES.items() for title, part in parts.items()}
    not_run, stale = left_over(parts, operator.ran, NOT_RUN)
    assert not not_run, "commands of docs/guides that no test runs: run them, or list them with the reason"
    assert not stale, "listed, and in no guide any more"
    assert set(operator.places) - operator.used_places == set(), "places of words that no guide has"
