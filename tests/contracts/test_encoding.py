"""Calls and answers arrive as they were sent, also from another release; all classes that cross are known."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import serve_app.contracts
from serve_app.contracts import encoding
from serve_app.contracts.commands import Command, FindUnsettled
from serve_app.contracts.encoding import (
    Unreadable,
    answer_to,
    call_of,
    decode_answer,
    decode_call,
    encode_answer,
    encode_call,
)
from serve_app.contracts.limiting import AccountStatus, Admit, Grant, Release, Status, Window
from serve_app.contracts.limits import Contract

STATUS = AccountStatus("acct", 1, 2, Contract(), (("smollm2", 5),))


def arrives(call: Any) -> Any:
    number, is_list, items = decode_call(encode_call(7, call))
    assert number == 7
    return call_of(is_list, items)


def answered(call: Any, answer: Any) -> Any:
    number, error, raw = decode_answer(encode_answer(7, answer, is_list=isinstance(call, list)))
    assert number == 7
    return answer_to(call, error, raw)


def commands() -> Iterator[type[Command[Any]]]:
    for module in pkgutil.iter_modules(serve_app.contracts.__path__):
        importlib.import_module(f"serve_app.contracts.{module.name}")
    waiting = [Command]
    while waiting:
        for found in waiting.pop().__subclasses__():
            waiting.append(found)
            yield found


@pytest.mark.parametrize("name", sorted({command.__name__ for command in commands()}))
def test_each_command_and_its_answer_can_cross(name: str) -> None:
    encoding._decoder(encoding._ITEMS[name])
    encoding._decoder(encoding._answer_type(name))


def test_the_names_of_commands_are_unique() -> None:
    found = {f"{command.__module__}.{command.__name__}" for command in commands()}
    assert len(found) == len({name.rpartition(".")[2] for name in found})


def test_calls_arrive_as_they_were_sent() -> None:
    admit = Admit("r", "holder", "digest", "svc-chat", 1, 2, 3, 4, idempotency_key="key", address="::1")
    assert arrives([admit, Release("r", 1, 2)]) == [admit, Release("r", 1, 2)]
    assert arrives([]) == []
    assert arrives(FindUnsettled(("a", "b"))) == FindUnsettled(("a", "b"))


def test_answers_arrive_as_they_were_sent() -> None:
    grant = Grant("r", "acct", "key", 5, 6, Window(1, 2, 3.5), Window(4, 5, 6))
    asks = [Release("r", 1, 2), Status(("a", "b"))]
    assert answered(asks, [None, (None, STATUS)]) == [None, (None, STATUS)]
    assert answered([asks[0], asks[0]], [grant, True]) == [grant, True]
    assert answered(FindUnsettled(("a",)), ["a"]) == ["a"]


def test_fields_of_other_releases_are_ignored_or_get_their_defaults() -> None:
    fields = {"request_id": "r", "prompt_tokens": 5, "of_a_later_release": [1]}
    frame = msgspec.msgpack.encode((1, True, [("Adjust", fields)]))
    [adjust] = call_of(*decode_call(frame)[1:])
    assert (adjust.request_id, adjust.prompt_tokens, adjust.key_digest) == ("r", 5, "")


@pytest.mark.parametrize("item", [("os.system", ["true"]), ("Command", {}), ("GetAccount", {}), ("GetAccount", [1])])
def test_what_is_no_call_is_refused(item: tuple[str, Any]) -> None:
    frame = msgspec.msgpack.encode((1, False, [item]))
    with pytest.raises(Unreadable):
        call_of(*decode_call(frame)[1:])
