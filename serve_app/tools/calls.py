"""Reads the parts that the families' calls share: arguments, and a JSON object with a name and arguments."""

from __future__ import annotations

import json
import random
import string as letters
from collections.abc import Collection

from serve_app.tools import json_text
from serve_app.tools.parts import CallArguments, CallEnded, CallStarted, Ending, Part, Text
from serve_app.tools.source import Source, Steps

LONGEST_NAME = 256  # characters, of a function called without quotes

_ID_LENGTH = 24
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


class CallReader:
    """Reads calls from a source into parts; the grammar of each family says where they lie.

    What was stepped over but is no part of a call stays held in the source. `offered` are the functions that a call
    without a marker may name: only they tell it from any other JSON. `rng` makes the ids.
    """

    def __init__(self, source: Source, offered: Collection[str], rng: random.Random) -> None:
        self.parts: list[Part] = []
        self.by_length = False  # whether the reply was ended by its length limit
        self.after_call = False  # whether no text came since the last call
        self._source = source
        self._offered = frozenset(offered)
        self._rng = rng
        self._calls = 0

    def release(self) -> None:
        """What is held is plain text."""
        if held := self._source.take_held():
            self.parts.append(Text(held))
            self.after_call = False

    def drop(self) -> None:
        """What is held belongs to the syntax of calls."""
        self._source.take_held()

    def arguments(self, name: str) -> Steps[bool]:
        """Read the arguments of a call of `name`, which begin here. False when there is no call, and all is held."""
        if not _is_name(name):
            return False
        c = yield from self._source.peek()
        if c == "{":
            self._start(name)
            self._source.drain_into(lambda _, text: self.parts.append(CallArguments(self._calls, text)))
            whole = yield from json_text.value(self._source)
            self._source.drain_into(None)
            self._end(Ending.COMPLETE if whole else Ending.CUT if self._source.over else Ending.MALFORMED)
            return True
        text = yield from self._odd_arguments()
        return self._whole(name, text)

    def object(self, marked: bool = True) -> Steps[bool]:
        """Read a call that is an object, which begins here. False when there is no call, and all is held.

        After True, what is held is text unless the grammar can use it: an object that goes wrong after its arguments
        is a call all the same. Unless `marked`, it must name an offered function and have none but the usual keys.
        """
        name: str | None = None
        early: str | None = None  # arguments that came before the name
        called = False
        self._source.at += 1
        c = yield from self._source.space()
        while c == '"':
            key = yield from self._text()
            if key is None or (not marked and key not in _KEYS) or (yield from self._source.space()) != ":":
                break
            self._source.at += 1
            c = yield from self._source.space()
            if key == "name" and name is None:
                name = yield from self._text() if c == '"' else _nothing()
                if name is None or not _is_name(name) or not (marked or name in self._offered):
                    name = None
                    break
                if early is not None:
                    called = self._whole(name, early)
            elif key in _ARGUMENTS and early is None and not called:
                if name is None:
                    early = yield from self._early_arguments(c)
                    if early is None:
                        break
                else:
                    called = yield from self.arguments(name)
                    if not called or not self._complete:
                        return called
            else:
                if not (yield from json_text.value(self._source)):
                    break
            c = yield from self._source.space()
            if c == ",":
                self._source.at += 1
                c = yield from self._source.space()
            elif c == "}":
                self._source.at += 1
                if name is not None and not called and marked:
                    called = self._whole(name, "{}")
                if called:
                    self.drop()
                return called
            else:
                break
        if name is not None and not called:
            called = self._whole(name, None)
        return called

    def array(self, marked: bool = True) -> Steps[bool]:
        """Read calls that are the objects of an array whose bracket was stepped over; as `object` does."""
        called = False
        while (yield from self._source.space()) == "{":
            if not (yield from self.object(marked)):
                if called:
                    self.release()
                break
            called = True
            c = yield from self._source.space()
            if c != ",":
                if c == "]":
                    self._source.at += 1
                    self.drop()
                break
            self._source.at += 1
        return called

    @property
    def _complete(self) -> bool:
        last = self.parts[-1] if self.parts else None
        return isinstance(last, CallEnded) and last.ending is Ending.COMPLETE

    def _whole(self, name: str, arguments: str | None) -> bool:
        """A call that is known at once; None where its arguments are missing: cut short, or no call at all."""
        if arguments is None and not (self.by_length and self._source.over):
            return False
        self._start(name)
        if arguments is not None:
            self.parts.append(CallArguments(self._calls, arguments))
        self._end(Ending.CUT if arguments is None else Ending.COMPLETE)
        return True

    def _early_arguments(self, first: str) -> Steps[str | None]:
        """The text of the arguments, held back."""
        if first != "{":
            return (yield from self._odd_arguments())
        copy: list[str] = []
        self._source.hold_and_copy(copy)
        whole = yield from json_text.value(self._source)
        self._source.drain_into(None)
        return "".join(copy) if whole else None

    def _odd_arguments(self) -> Steps[str | None]:
        """The text of arguments that are null, or an object's JSON in a string; None when they are not."""
        c = yield from self._source.peek()
        if c == "n":
            return "{}" if (yield from self._source.constant("null")) else None
        text = yield from self._text() if c == '"' else _nothing()
        try:
            return text if text is not None and text.encode() and isinstance(json.loads(text), dict) else None
        except (ValueError, RecursionError):
            return None

    def _text(self) -> Steps[str | None]:
        """The text of a string that begins here."""
        copy: list[str] = []
        self._source.hold_and_copy(copy)
        whole = yield from json_text.string(self._source)
        self._source.drain_into(None)
        return str(json.loads("".join(copy))) if whole else None

    def _start(self, name: str) -> None:
        self.drop()
        tail = "".join(self._rng.choice(letters.ascii_letters + letters.digits) for _ in range(_ID_LENGTH))
        self.parts.append(CallStarted(self._calls, f"call_{tail}", name))

    def _end(self, ending: Ending) -> None:
        self.parts.append(CallEnded(self._calls, ending))
        self._calls += 1
        self.after_call = True


def _is_name(name: str) -> bool:
    return 0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()


def _nothing() -> Steps[None]:
    return None
    yield
