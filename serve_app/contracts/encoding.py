"""Encodes calls to the limiter and to accounting, and their answers, in MessagePack.

A call is a command, or a list of asks or of settlements. Classes and fields are sent by name: a release ignores fields
that it does not know, and uses defaults for missing fields. Nothing is unpickled, so received data cannot run code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Final, get_args, get_origin

import msgspec

from serve_app.contracts import (  # loads all modules with commands, which `_commands` then finds
    billing,  # noqa: F401
    errors,
    limiting,
    management,  # noqa: F401
    notices,  # noqa: F401
    operators,  # noqa: F401
    payments,  # noqa: F401
    people,  # noqa: F401
    recharges,  # noqa: F401
    sealed_secrets,  # noqa: F401
    served_commands,  # noqa: F401
    sign_in,  # noqa: F401
)
from serve_app.contracts.books import Settled, Settlement, SettlementRejected
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import Command


class Unreadable(Exception):
    """The call was not run: it has a value that does not fit its field, or a class that this release does not know."""


def _commands(base: type[Any] = Command) -> Iterator[type[Any]]:
    for command in base.__subclasses__():
        if "__slots__" in vars(command):  # skips the class that `dataclass(slots=True)` has replaced with a second one
            yield command
            yield from _commands(command)


#: Types of the items in calls and in lists of answers. The answers to Status, Announce and Release are built-in types.
_ITEMS: Final[dict[str, Any]] = {
    "NoneType": None,
    "bool": bool,
    "tuple": tuple[limiting.AccountStatus | None, ...],
    **{kind.__name__: kind for kind in (Settlement, Settled, SettlementRejected)},
    **{name: kind for name, kind in vars(limiting).items() if is_dataclass(kind)},
    **{command.__name__: command for command in _commands()},
}
_ERRORS: Final[dict[str, type[Exception]]] = {
    "Unavailable": Unavailable,
    "Unreadable": Unreadable,
    **{name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)},
}
_Item = tuple[str, msgspec.Raw]
_Call = tuple[int, bool, list[_Item]]
_Reply = tuple[int, _Item | None, msgspec.Raw]
_encoder: Final = msgspec.msgpack.Encoder()
_call_decoder: Final = msgspec.msgpack.Decoder(_Call)
_reply_decoder: Final = msgspec.msgpack.Decoder(_Reply)
_list_decoder: Final = msgspec.msgpack.Decoder(list[_Item])


def encode_call(number: int, call: Any) -> bytes:
    """Returns the frame of a call. Raises Unreadable."""
    items = call if isinstance(call, list) else [call]
    try:
        return _encoder.encode((number, items is call, [(type(item).__name__, item) for item in items]))
    except (TypeError, ValueError, OverflowError) as error:  # half of a surrogate pair, an integer beyond 64 bits
        raise Unreadable(f"{type(items[0]).__name__}: {error}") from None


def decode_call(frame: bytes) -> tuple[int, bool, list[_Item]]:
    """Returns the call's number, and the arguments for `call_of`. Raises msgspec.DecodeError."""
    return _call_decoder.decode(frame)


def call_of(is_list: bool, items: list[_Item]) -> Any:
    """Returns the call. Raises Unreadable."""
    try:
        decoded = [_decoded(item) for item in items]
    except (LookupError, msgspec.DecodeError) as error:
        raise Unreadable(f"{items[0][0]}: {error}") from None
    return decoded if is_list else decoded[0]


def encode_answer(number: int, answer: Any, *, is_list: bool) -> bytes:
    """Returns the frame of an answer, which is a list if `is_list`. `answer_to` raises an answer that is an error."""
    if isinstance(answer, Exception):
        return encode_error(number, answer)
    return _encoder.encode((number, None, [_encodable(item) for item in answer] if is_list else answer))


def encode_error(number: int, error: Exception) -> bytes:
    """Returns the frame of a call that failed."""
    try:
        return _encoder.encode((number, _encodable(error), None))
    except Exception:  # arguments that MessagePack cannot encode
        return _encoder.encode((number, ("RuntimeError", (repr(error),)), None))


def decode_answer(frame: bytes) -> tuple[int, _Item | None, msgspec.Raw]:
    """Returns the call's number, and the arguments `error` and `raw` for `answer_to`. Raises msgspec.DecodeError."""
    return _reply_decoder.decode(frame)


def answer_to(call: Any, error: _Item | None, raw: msgspec.Raw) -> Any:
    """Returns the answer to `call`, or raises its error. Raises Unavailable if this release can't read the answer."""
    try:
        if error is not None:
            answer = _decoded(error)
        elif isinstance(call, list):
            answer = [_decoded(item) for item in _list_decoder.decode(raw)]
        else:
            answer = _decoder(_answer_type(type(call).__name__)).decode(raw)
    except (LookupError, msgspec.DecodeError) as unreadable:
        raise Unavailable(f"the answer can't be read: {unreadable}") from None
    if error is not None:
        raise answer
    return answer


def _encodable(item: Any) -> tuple[str, Any]:
    if not isinstance(item, Exception):
        return type(item).__name__, item
    name = type(item).__name__
    return (name, item.args) if name in _ERRORS else ("RuntimeError", (f"{name}: {item}",))


def _decoded(item: _Item) -> Any:
    name, raw = item
    if name in _ITEMS:
        return _decoder(_ITEMS[name]).decode(raw)
    if name in _ERRORS or name == "RuntimeError":
        return _ERRORS.get(name, RuntimeError)(*msgspec.msgpack.decode(raw))
    raise LookupError(f"this release does not know {name}")


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@cache
def _answer_type(command: str) -> Any:
    return next(get_args(base)[0] for base in _ITEMS[command].__orig_bases__ if get_origin(base) is Command)
