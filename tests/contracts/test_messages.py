"""A message of an earlier release has the defaults of the fields that it lacks."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from serve_app.contracts.books import KeySnapshot, UsageRow
from serve_app.contracts.commands import ListUsage, SumUsage
from serve_app.contracts.generation import BackendEvent, Delta, Finished, FinishReason, Started
from serve_app.contracts.limiting import Admit, Grant, Identify, Identity, LiveReport, Refusal, Renew, Window

WINDOW = Window(1, 1, 1.0)


@pytest.mark.parametrize(
    ("message", "new"),
    [
        (Admit("r", "g", "d", "m", 1, 1, 1, 1), {"address": ""}),
        (Identify("d"), {"address": ""}),
        (Identity("a", "k"), {"from_anywhere": True}),
        (Grant("r", "a", "k", 1, 1, WINDOW, WINDOW), {"from_anywhere": True}),
        (Refusal("r", 401, "invalid_api_key", "m"), {"from_anywhere": True}),
        (Renew("g", ()), {"spool": None}),
        (LiveReport(True, 0, 0, (), ()), {"gateways": ()}),
        (KeySnapshot("k", "a", "n", "d", "h", True, 1, 0.0), {"tags": None, "addresses": None}),
        (UsageRow(1, 1, 1, 1, 1), {"tag": None}),
        (SumUsage("a"), {"tag": None}),
        (ListUsage("a"), {"tag": None}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_a_message_of_the_release_before_is_read(message: Any, new: dict[str, Any]) -> None:
    earlier = object.__new__(type(message))
    earlier.__setstate__(message.__getstate__()[: -len(new)])
    assert earlier == message
    assert {name: getattr(earlier, name) for name in new} == new
    assert pickle.loads(pickle.dumps(message)) == message


@pytest.mark.parametrize("event", [Started(1, 0), Delta("a", 1), Finished(FinishReason.STOP, 1, 0, 1)], ids=str)
def test_an_event_of_another_release_is_read(event: Any) -> None:
    decoder = msgspec.msgpack.Decoder(BackendEvent)
    fields = msgspec.to_builtins(event)
    required = sum(field.required for field in msgspec.structs.fields(event))
    assert decoder.decode(msgspec.msgpack.encode(fields[: 1 + required])) == event, "of the release before"
    assert decoder.decode(msgspec.msgpack.encode([*fields, "new"])) == event, "of a later release"
    assert pickle.loads(pickle.dumps(event)) == event


def test_a_message_without_a_field_that_it_must_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="key_id"):
        object.__new__(Identity).__setstate__(["a"])
