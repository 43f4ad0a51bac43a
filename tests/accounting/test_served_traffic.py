"""Weights of backends: each change compares and keeps what was before, and one rollback undoes a roll-out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serve_app.contracts.books import Audit
from serve_app.contracts.errors import Conflict, InvalidValue, ModelNotFound
from serve_app.contracts.served import Served, Traffic
from serve_app.contracts.served_commands import (
    DeployBackend,
    ListTraffic,
    ReadServed,
    RetireBackend,
    RollBackTraffic,
    SetTraffic,
)

from .books import NOON, Books, Ledger

CONFIGURED = {"old": 100}
ADA, RULE = Audit("ada"), Audit("rule")


def set_traffic(ledger: Ledger, weights: dict[str, int], **more: Any) -> Traffic:
    return ledger.run(SetTraffic("svc-chat", weights, configured=CONFIGURED, **more))


def read(ledger: Ledger) -> Served:
    served = ledger.run(ReadServed())
    assert served is not None
    return served


def weights(ledger: Ledger) -> dict[str, int]:
    return dict(read(ledger).traffic["svc-chat"].weights)


def test_a_gateway_hears_of_each_change_once(ledger: Ledger) -> None:
    assert ledger.run(ReadServed()) == Served(0)
    assert ledger.run(ReadServed(0)) is None
    row = set_traffic(ledger, {"old": 95, "new": 5})
    served = ledger.run(ReadServed(0))
    assert served is not None
    assert (served.version, served.traffic["svc-chat"]) == (row.version, row)
    assert ledger.run(ReadServed(served.version)) is None
    ledger.create_account("Bob")  # it takes a version of the ledger, which is none of what is served
    assert ledger.run(ReadServed(served.version)) is None


def test_versions_rise_over_all_identifiers(ledger: Ledger) -> None:
    first = set_traffic(ledger, {"old": 1, "new": 1}).version
    second = ledger.run(SetTraffic("svc-coder", {"old": 1, "new": 1}, configured=CONFIGURED)).version
    assert first < second == read(ledger).version


def test_the_first_change_also_keeps_the_weights_of_the_configuration(timed: Books) -> None:
    ledger = timed.ledger
    set_traffic(ledger, {"old": 95, "new": 5}, reason="canary", audit=ADA)
    canary, configured = ledger.run(ListTraffic("svc-chat"))
    assert (canary.weights, canary.actor, canary.reason) == ({"old": 95, "new": 5}, "ada", "canary")
    assert (configured.weights, configured.actor, configured.before) == (CONFIGURED, "config.yaml", None)
    assert canary.changed_at == configured.changed_at == NOON
    assert read(ledger).before["svc-chat"] == configured
    assert ledger.run(ListTraffic("svc-chat", before=canary.version)) == [configured]


def test_one_rollback_undoes_the_whole_roll_out(ledger: Ledger) -> None:
    for share in (5, 50, 100):
        last = set_traffic(ledger, {"old": 100 - share, "new": share})
    undone = ledger.run(RollBackTraffic("svc-chat", last.version, audit=ADA))
    assert (undone.weights, undone.undoes, undone.before) == (CONFIGURED, last.version, None)
    assert weights(ledger) == CONFIGURED
    with pytest.raises(Conflict, match="no earlier weights to restore"):
        ledger.run(RollBackTraffic("svc-chat", undone.version))


def test_a_second_rollback_goes_one_roll_out_further(ledger: Ledger) -> None:
    set_traffic(ledger, {"old": 50, "new": 50})
    set_traffic(ledger, {"new": 100})
    set_traffic(ledger, {"new": 90, "newest": 10})
    for expected in ({"new": 100}, CONFIGURED):
        ledger.run(RollBackTraffic("svc-chat", read(ledger).traffic["svc-chat"].version))
        assert weights(ledger) == expected


def test_the_rollback_of_a_change_by_hand_restores_what_was_before_it(ledger: Ledger) -> None:
    set_traffic(ledger, {"old": 50, "new": 50})
    back = set_traffic(ledger, {"old": 100})  # raises another backend: not a step of the same roll-out
    ledger.run(RollBackTraffic("svc-chat", back.version))
    assert weights(ledger) == {"old": 50, "new": 50}


def test_of_several_gateways_that_roll_back_one_writes(ledger: Ledger) -> None:
    canary = set_traffic(ledger, {"old": 95, "new": 5})
    command = RollBackTraffic("svc-chat", canary.version, "rule: 7 of 9 requests failed", RULE)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: ledger.run(command), range(4)))
    assert all(row == rows[0] for row in rows)
    assert len(ledger.run(ListTraffic("svc-chat"))) == 3
    [record] = [one for one in ledger.audit_log() if one.actor == "rule"]
    assert (record.action, record.subject) == ("roll_back_traffic", "svc-chat")
    assert record.detail["weights"] == {"was": {"old": 95, "new": 5}, "is": CONFIGURED}
    assert record.detail["reason"] == "rule: 7 of 9 requests failed"


def test_a_late_rollback_does_not_undo_a_newer_change(ledger: Ledger) -> None:
    canary = set_traffic(ledger, {"old": 95, "new": 5})
    set_traffic(ledger, {"old": 90, "new": 10}, audit=ADA)
    with pytest.raises(Conflict, match="set by ada: look again"):
        ledger.run(RollBackTraffic("svc-chat", canary.version))


def test_a_change_of_another_version_than_expected_is_refused(ledger: Ledger) -> None:
    first = set_traffic(ledger, {"old": 95, "new": 5}, expected=0)
    with pytest.raises(Conflict, match="look again"):
        set_traffic(ledger, {"old": 1}, expected=0)
    set_traffic(ledger, {"old": 90, "new": 10}, expected=first.version)
    assert weights(ledger) == {"old": 90, "new": 10}


def test_a_repetition_changes_nothing(ledger: Ledger) -> None:
    first = set_traffic(ledger, {"old": 95, "new": 5, "gone": 0}, expected=0, audit=ADA)
    assert set_traffic(ledger, {"old": 95, "new": 5}, expected=0, audit=ADA) == first
    assert read(ledger).version == first.version
    assert len(ledger.audit_log()) == 1


def test_empty_weights_let_those_of_the_configuration_hold_again(ledger: Ledger) -> None:
    with pytest.raises(InvalidValue, match="already apply"):
        set_traffic(ledger, {})
    set_traffic(ledger, {"old": 95, "new": 5})
    set_traffic(ledger, {})
    assert read(ledger).traffic == {}
    assert set_traffic(ledger, {}).weights == {}
    again = set_traffic(ledger, {"old": 90, "new": 10}, expected=0)
    assert read(ledger).before["svc-chat"].weights == CONFIGURED
    assert [row.weights for row in ledger.run(ListTraffic("svc-chat", limit=3))] == [again.weights, CONFIGURED, {}]


def test_only_an_identifier_that_exists_has_traffic(ledger: Ledger) -> None:
    for unknown in ("svc-none", "a\0b"):
        with pytest.raises((ModelNotFound, InvalidValue)):
            ledger.run(SetTraffic(unknown, {"old": 1}))
        with pytest.raises((ModelNotFound, InvalidValue)):
            ledger.run(RollBackTraffic(unknown, 1))
        assert ledger.run(ListTraffic(unknown)) == []


def test_weights_that_make_no_sense_are_refused(ledger: Ledger) -> None:
    wrong = {"old": -1}, {"old": True}, {"old": 0}, {"": 1}
    for given, problem in zip(wrong, ("whole number", "whole number", "above 0", "a backend"), strict=True):
        with pytest.raises(InvalidValue, match=problem):
            set_traffic(ledger, given)
    assert read(ledger) == Served(0)


def test_a_retired_backend_gets_no_traffic(ledger: Ledger) -> None:
    ledger.run(DeployBackend("new", {"model": "bundled"}))
    canary = set_traffic(ledger, {"old": 95, "new:adapter": 5})
    set_traffic(ledger, {"other": 100})
    ledger.run(RetireBackend("new"))
    with pytest.raises(Conflict, match="new is retired"):
        set_traffic(ledger, dict(canary.weights))
    with pytest.raises(Conflict, match="new is retired"):
        ledger.run(RollBackTraffic("svc-chat", read(ledger).traffic["svc-chat"].version))
