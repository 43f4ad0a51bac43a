"""A conversation stays at its replica while the replicas stay, and no replica gets far more than its share."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.gateway.conversations import BOUND, MIN_BOUND, conversation_key, load_bound, replicas_for

FEW = settings(max_examples=30)
NAMES = st.sets(st.text("abcdef0123456789", min_size=4, max_size=8), min_size=1, max_size=12)
CONVERSATIONS = st.binary(min_size=16, max_size=16)
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "What is a river?"}
LATER = [{"role": "assistant", "content": "Water."}, {"role": "user", "content": "And a lake?"}]


def key(*messages: dict[str, str], account: str = "a") -> bytes:
    return conversation_key(account, messages)


def home(conversation: bytes, names: set[str]) -> str:
    return replicas_for(conversation, dict.fromkeys(names, 0))[0]


def test_later_turns_are_of_the_same_conversation() -> None:
    assert key(SYSTEM, FIRST) == key(SYSTEM, FIRST, *LATER)
    assert key(FIRST) == key(FIRST, *LATER)


def test_another_account_or_another_beginning_is_another_conversation() -> None:
    others = [key(SYSTEM, FIRST, account="b"), key(FIRST), key(SYSTEM, LATER[1]), key(SYSTEM), key()]
    assert len({key(SYSTEM, FIRST), *others}) == 6


@FEW
@given(CONVERSATIONS, NAMES)
def test_the_order_does_not_depend_on_how_the_replicas_are_listed(conversation: bytes, names: set[str]) -> None:
    there = dict.fromkeys(sorted(names), 0)
    back = dict.fromkeys(sorted(names, reverse=True), 0)
    assert replicas_for(conversation, there) == replicas_for(conversation, back)


@FEW
@given(CONVERSATIONS, NAMES, st.data())
def test_a_lost_replica_moves_only_its_own_conversations(
    conversation: bytes, names: set[str], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(sorted(names)))
    order = replicas_for(conversation, dict.fromkeys(names, 0))
    assert replicas_for(conversation, dict.fromkeys(names - {lost}, 0)) == [name for name in order if name != lost]


@FEW
@given(CONVERSATIONS, NAMES, st.text("ghij", min_size=4, max_size=8))
def test_a_new_replica_takes_conversations_and_moves_none_between_the_others(
    conversation: bytes, names: set[str], new: str
) -> None:
    assert home(conversation, names | {new}) in {new, home(conversation, names)}


@FEW
@given(st.lists(CONVERSATIONS, min_size=1, max_size=5), NAMES, st.lists(st.integers(0, 4), max_size=200))
def test_no_replica_gets_more_than_the_bound(conversations: list[bytes], names: set[str], calls: list[int]) -> None:
    running = dict.fromkeys(names, 0)
    for number in calls:
        running[replicas_for(conversations[number % len(conversations)], running)[0]] += 1
    assert max(running.values()) <= max(MIN_BOUND, math.ceil(BOUND * len(calls) / len(names)))


@FEW
@given(CONVERSATIONS, st.dictionaries(st.text("abcdef0123456789", min_size=4), st.integers(0, 50), min_size=1))
def test_a_replica_with_room_is_asked_before_those_without_and_all_are_asked(
    conversation: bytes, running: dict[str, int]
) -> None:
    order = replicas_for(conversation, running)
    assert sorted(order) == sorted(running)
    most = load_bound(sum(running.values()) + 1, len(running))
    with_room = [running[name] < most for name in order]
    assert with_room[0]
    assert with_room == sorted(with_room, reverse=True)


def test_a_few_requests_do_not_move_a_conversation() -> None:
    names = {"one", "two", "three"}
    at = home(b"x" * 16, names)
    assert replicas_for(b"x" * 16, {name: MIN_BOUND - 1 if name == at else 0 for name in names})[0] == at
    assert replicas_for(b"x" * 16, {name: MIN_BOUND if name == at else 0 for name in names})[0] != at


def test_conversations_are_spread_over_the_replicas() -> None:
    names = {f"replica-{number}" for number in range(4)}
    homes = Counter(home(number.to_bytes(16), names) for number in range(4000))
    assert all(800 < count < 1200 for count in homes.values())
