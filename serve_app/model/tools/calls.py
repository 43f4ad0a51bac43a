"""Reads the parts that all tool-call formats share: arguments, and a JSON object with a name and arguments."""

from __future__ import annotations

import json
import random
import string as letters
from collections.abc import Collection

from serve_app.contracts.generation import CallArguments, CallEnded, CallStarted, Ending, Part, Text
from serve_app.model.tools.source import Source, Steps

LONGEST_NAME = 256  # maximum characters of a function's name, quoted or not

_ID_LENGTH = 24
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


class CallReader:
    """Reads calls from a source into parts. Each format's parser finds where the calls are.

    Skipped text stays held in the source until it is known whether it is part of a call. `offered` has the function
    names that are allowed in a call without a marker; only its keys and the name distinguish such a call from other
    JSON. `rng` generates the ids. `checked` and `only_calls` are as in `ReplyParser`.
    """

    def __init__(
        self,
        source: Source,
        offered: Collection[str],
        rng: random.Random,
        checked: bool = False,
        only_calls: bool = False,
    ) -> None:
        self.parts: list[Part] = []
        self.by_length = False  # whether the length limit ended the reply
        self.after_call = False  # whether no text has come since the last call
        self._source = source
        self._offered = frozenset(offered)
        self._rng = rng
        self._checked = checked or only_calls
        self._only_calls = only_calls
        self._calls = 0

    def add_text(self, text: str) -> None:
        if text and not self._only_calls:
            self.parts.append(Text(text))
            self.after_call = False

    def keep_as_text(self) -> None:
        """Adds the held text to the reply as plain text."""
        self.add_text(self._source.take_held())

    def end_attempt(self) -> None:
        """Ends a failed attempt to read a call: its held text becomes plain text.

        At the end of a reply that a grammar has checked, the text is an incomplete call and is dropped instead.
        """
        if self._checked and self._source.is_over:
            self.drop_held()
        else:
            self.keep_as_text()

    def drop_held(self) -> None:
        """Drops the held text, which belongs to the syntax of calls."""
        self._source.take_held()

    def read_arguments(self, name: str) -> Steps[bool]:
        """Reads the arguments of a call of `name`, which begin here. If there is no call, keeps the text held.

        Returns whether there is a call.
        """
        if not _is_name(name):
            return False
        if (yield from self._source.next_char()) != "{":
            return self._complete_call(name, (yield from self._null_or_quoted_arguments()))
        self._start_call(name)
        self._source.copy_to(lambda text: self.parts.append(CallArguments(self._calls, text)), hold=False)
        complete = yield from self._source.json_value()
        self._source.copy_to(None)
        self._end_call(Ending.COMPLETE if complete else Ending.CUT if self._source.is_over else Ending.MALFORMED)
        return True

    def read_object(self, marked: bool = True) -> Steps[bool]:
        """Reads a call in the form of a JSON object, which begins here. If there is no call, keeps the text held.

        Returns whether there is a call. Without `marked`, the object must name an offered function and have only keys
        of `_KEYS`. An object that becomes invalid after its arguments still counts as a call. The text after the
        arguments is then held. It is plain text, unless it belongs to the format's syntax.
        """
        name: str | None = None
        early: str | None = None  # arguments that came before the name
        called = False
        self._source.at += 1
        c = yield from self._source.skip_space()
        while c == '"':
            key = yield from self._string()
            if key is None or (not marked and key not in _KEYS) or (yield from self._source.skip_space()) != ":":
                break
            self._source.at += 1
            c = yield from self._source.skip_space()
            if key == "name" and name is None:
                name = yield from self._string()
                if name is None or not _is_name(name) or not (marked or name in self._offered):
                    name = None
                    break
                if early is not None:
                    called = self._complete_call(name, early)
            elif key in _ARGUMENTS and early is None and not called:
                if name is None:
                    early = yield from self._early_arguments(c)
                    if early is None:
                        break
                else:
                    called = yield from self.read_arguments(name)
                    if not called or not self._is_complete:
                        return called
            elif not (yield from self._source.json_value()):
                break
            c = yield from self._source.skip_space()
            if c == ",":
                self._source.at += 1
                c = yield from self._source.skip_space()
            elif c == "}":
                self._source.at += 1
                if name is not None and not called and marked:
                    called = self._complete_call(name, "{}")
                if called:
                    self.drop_held()
                return called
            else:
                break
        if name is not None and not called:
            called = self._complete_call(name, None)
        return called

    def read_objects_after(self, marked: bool) -> Steps[None]:
        """Reads the objects that follow a call: side by side, or separated by commas or semicolons."""
        c = yield from self._source.skip_space()
        while c and c in ",;{":
            if c != "{":
                self._source.at += 1
                c = yield from self._source.skip_space()
            if c != "{":
                break
            if not (yield from self.read_object(marked)):
                self.end_attempt()
                break
            c = yield from self._source.skip_space()

    def read_array(self, marked: bool = True) -> Steps[bool]:
        """Reads the calls in an array whose opening bracket was skipped; otherwise like `read_object`."""
        called = False
        while (yield from self._source.skip_space()) == "{":
            if not (yield from self.read_object(marked)):
                if called:
                    self.end_attempt()
                break
            called = True
            c = yield from self._source.skip_space()
            if c != ",":
                if c == "]":
                    self._source.at += 1
                    self.drop_held()
                break
            self._source.at += 1
        return called

    @property
    def _is_complete(self) -> bool:
        last = self.parts[-1] if self.parts else None
        return isinstance(last, CallEnded) and last.ending is Ending.COMPLETE

    def _complete_call(self, name: str, arguments: str | None) -> bool:
        """Adds a call whose arguments have been read. None means that they are incomplete or not valid.

        With None, adds an incomplete call if the reply ends here, provided that the length limit has cut the reply or a
        grammar has checked it. Otherwise, returns False.
        """
        if arguments is None and not ((self.by_length or self._checked) and self._source.is_over):
            return False
        self._start_call(name)
        if arguments is not None:
            self.parts.append(CallArguments(self._calls, arguments))
        self._end_call(Ending.CUT if arguments is None else Ending.COMPLETE)
        return True

    def _early_arguments(self, first: str) -> Steps[str | None]:
        """Returns the text of arguments that come before the function's name. The text stays held."""
        copied = self._copied(self._source.json_value()) if first == "{" else self._null_or_quoted_arguments()
        return (yield from copied)

    def _null_or_quoted_arguments(self) -> Steps[str | None]:
        """Returns the text of arguments that are null or an object's JSON in a string; None for other arguments."""
        if (yield from self._source.next_char()) == "n":
            return "{}" if (yield from self._source.skip("null")) else None
        text = yield from self._string()
        try:
            return text if text is not None and text.encode() and isinstance(json.loads(text), dict) else None
        except (ValueError, RecursionError):
            return None

    def _string(self) -> Steps[str | None]:
        """Returns the value of a string that begins here; None if there is no string."""
        if (yield from self._source.next_char()) != '"':
            return None
        quoted = yield from self._copied(self._source.json_string())
        return None if quoted is None else str(json.loads(quoted))

    def _copied(self, steps: Steps[bool]) -> Steps[str | None]:
        """Runs `steps` and returns the text that they skip, which is also held; None if they fail."""
        copy: list[str] = []
        self._source.copy_to(copy.append)
        succeeded = yield from steps
        self._source.copy_to(None)
        return "".join(copy) if succeeded else None

    def _start_call(self, name: str) -> None:
        self.drop_held()
        tail = "".join(self._rng.choice(letters.ascii_letters + letters.digits) for _ in range(_ID_LENGTH))
        self.parts.append(CallStarted(self._calls, f"call_{tail}", name))

    def _end_call(self, ending: Ending) -> None:
        self.parts.append(CallEnded(self._calls, ending))
        self._calls += 1
        self.after_call = True


def _is_name(name: str) -> bool:
    return 0 < len(name) <= LONGEST_NAME and name.isprintable() and name == name.strip()
