"""Which backend a conversation gets: by weight, always the same one, and another only if that one is out."""

from __future__ import annotations

from collections import Counter
from math import sqrt

import pytest

from serve_app.contracts.money import Price, PriceVersion
from serve_app.contracts.served import ModelSpec, Served, ServedModel, Traffic
from serve_app.gateway.backends import Availability, Catalogue
from serve_app.settings import GatewaySettings

PRICE = {"input": "1", "cached_input": "0.5", "output": "3"}
CONVERSATIONS = [(f"acct_{number % 20}", [{"role": "user", "content": f"Question {number}"}]) for number in range(4000)]


def catalogue(weights: dict[str, int], availability: Availability | None = None, **more: object) -> Catalogue:
    models = {"svc-chat": {"backends": weights, "price": PRICE, **more}}
    return Catalogue(GatewaySettings.model_validate({"models": models}), availability=availability)


def chosen(of: Catalogue) -> list[str]:
    return [of.choose_backend("svc-chat", account, messages) for account, messages in CONVERSATIONS]


@pytest.mark.parametrize("weights", [{"old": 95, "new": 5}, {"old": 50, "new": 50}, {"a": 3, "b": 2, "c": 1}])
def test_the_shares_are_within_the_99_percent_interval_of_the_weights(weights: dict[str, int]) -> None:
    counts, whole = Counter(chosen(catalogue(weights))), sum(weights.values())
    for name, weight in weights.items():
        share = weight / whole
        spread = 2.576 * sqrt(len(CONVERSATIONS) * share * (1 - share))
        assert abs(counts[name] - share * len(CONVERSATIONS)) <= spread


def test_a_conversation_stays_while_it_grows() -> None:
    one = catalogue({"old": 50, "new": 50})
    for account, messages in CONVERSATIONS[:200]:
        first = [{"role": "system", "content": "Be brief."}, *messages]
        grown = [*first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
        assert one.choose_backend("svc-chat", account, first) == one.choose_backend("svc-chat", account, grown)


def test_accounts_that_send_the_same_prompt_are_spread() -> None:
    one = catalogue({"old": 50, "new": 50})
    messages = [{"role": "user", "content": "Hello"}]
    counts = Counter(one.choose_backend("svc-chat", f"acct_{number}", messages) for number in range(400))
    assert min(counts.values()) > 140


def test_a_change_of_weights_moves_the_changed_share_and_no_more() -> None:
    before, after = chosen(catalogue({"old": 95, "new": 5})), chosen(catalogue({"old": 50, "new": 50}))
    moves = Counter((one, other) for one, other in zip(before, after, strict=True) if one != other)
    assert set(moves) == {("old", "new")}
    assert 0.40 < moves["old", "new"] / len(CONVERSATIONS) < 0.50


def test_only_the_conversations_of_a_backend_that_is_out_move_and_they_come_back() -> None:
    availability = Availability()
    one = catalogue({"a": 40, "b": 40, "c": 20}, availability)
    before = chosen(one)
    availability.out = {"svc-chat": frozenset({"b"})}
    during = chosen(one)
    assert all(new == old for old, new in zip(before, during, strict=True) if old != "b")
    assert {new for old, new in zip(before, during, strict=True) if old == "b"} == {"a", "c"}
    availability.out = {}
    assert chosen(one) == before


def test_a_probe_is_one_request_of_a_conversation_that_belongs_to_the_backend() -> None:
    availability = Availability()
    one = catalogue({"a": 50, "b": 50}, availability)
    before = chosen(one)
    availability.out = {"svc-chat": frozenset({"b"})}
    accounts = frozenset(account for account, _ in CONVERSATIONS)
    availability.probes = {("svc-chat", "b"): accounts - {"acct_7"}}
    during = chosen(one)
    assert during.count("b") == 1
    assert before[during.index("b")] == "b"
    assert CONVERSATIONS[during.index("b")][0] == "acct_7"
    assert availability.probes == {}


def test_the_fallback_replies_only_while_no_backend_with_weight_is_available() -> None:
    availability = Availability()
    one = catalogue({"a": 100, "b": 0}, availability, fallback="small")
    assert set(chosen(one)) == {"a"}
    availability.out = {"svc-chat": frozenset({"a"})}
    assert set(chosen(one)) == {"small"}
    availability.out = {"svc-chat": frozenset({"a", "small"})}
    assert set(chosen(one)) == {"a"}, "a request that waits for its backend is better than none"
    assert one.behind("svc-chat") == ("a", "small")


def served(**more: object) -> Served:
    traffic = Traffic("svc-chat", 7, {"new": 10}, 0.0, "ada", "")
    fields: dict[str, object] = {"version": 9, "traffic": {"svc-chat": traffic}, **more}
    return Served(**fields)  # type: ignore[arg-type]


def test_the_ledgers_weights_hold_in_place_of_those_of_the_configuration() -> None:
    settings = GatewaySettings.model_validate({"models": {"svc-chat": {"backends": {"old": 100}, "price": PRICE}}})
    one = Catalogue(settings, served())
    assert one.behind("svc-chat") == ("new",)
    assert one.configured["svc-chat"].backends == {"old": 100}


def test_a_price_takes_effect_at_its_time() -> None:
    settings = GatewaySettings.model_validate({"models": {"svc-chat": {"backends": {"old": 100}, "price": PRICE}}})
    later = [PriceVersion("svc-chat", 3, 100.0, Price(2, 2, 2)), PriceVersion("svc-chat", 4, 200.0, Price(3, 3, 3))]
    one = Catalogue(settings, served(prices={"svc-chat": later}))
    assert [one.price("svc-chat", at).input for at in (99.9, 100.0, 199.9, 200.0)] == [1000, 2, 2, 3]


def test_an_identifier_of_the_ledger_is_served_with_its_limits() -> None:
    spec = ModelSpec(1000, 100, recommended_temperatures={"law": 0.2}, fallback="small", aliases=("law-*",))
    both = {"svc-law": Traffic("svc-law", 8, {"law": 1}, 0.0, "ada", ""), **served().traffic}
    settings = GatewaySettings.model_validate({"models": {"svc-chat": {"backends": {"old": 100}, "price": PRICE}}})
    one = Catalogue(
        settings,
        served(
            traffic=both,
            models={"svc-law": ServedModel("svc-law", 8, spec, 0.0)},
            prices={"svc-law": [PriceVersion("svc-law", 8, 50.0, Price(270, 70, 1100))]},
        ),
    )
    assert one.identifiers == ("svc-chat", "svc-law")
    assert one.served["svc-law"] == (1000, 100)
    assert one.served.identifier_of("law-1") == "svc-law"
    assert one.behind("svc-law") == ("law", "small")
    assert one["svc-law"].price.input == "0.27"
    assert one.price("svc-law", 10.0) == Price(270, 70, 1100), "clocks of two machines differ"
