"""JSON text by RFC 8259, checked as it arrives, without recursion and without building any value."""

from __future__ import annotations

import re

from serve_app.tools.source import Source, Steps

MAX_DEPTH = 200  # of arrays and objects in one another; readers of JSON that recurse give up somewhere past it

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = re.compile(r"[0-9a-fA-F]")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_OF_NUMBERS = re.compile(r"[-+.0-9eE]+")
_LONGEST_NUMBER = 400  # characters; no double needs as many
_LITERALS = {"t": "true", "f": "false", "n": "null"}


def string(source: Source) -> Steps[bool]:
    """Step over a string, which begins here; False stops at the first character that can't be.

    Line breaks and other control characters, which models write into strings as they are, pass on escaped.
    """
    source.at += 1
    while True:
        if source.at == len(source.text) and not (yield from source.more()):
            return False
        plain = _PLAIN.match(source.text, source.at)
        if plain:
            source.at = plain.end()
            continue
        c = source.text[source.at]
        if c == '"':
            source.at += 1
            return True
        if c == "\\":
            source.at += 1
            c = yield from source.peek()
            if not c or c not in '"\\/bfnrtu':
                return False
            source.at += 1
            if c == "u":
                for _ in range(4):
                    c = yield from source.peek()
                    if not _HEX.match(c):
                        return False
                    source.at += 1
        else:
            source.step_over_as(f"\\u{ord(c):04x}")


def value(source: Source) -> Steps[bool]:
    """Step over a value, which begins here; False stops at the first character that can't be.

    A value that is a number ends before the first character that is no part of one.
    """
    closers: list[str] = []
    wants = "value"  # or: value or end, key, key or end, colon, next
    while True:
        # A value at the top stands here already; white space before it is the caller's.
        c = yield from source.space() if closers else source.peek()
        if not c:
            return False
        if closers and c == closers[-1] and wants in ("next", "value or end", "key or end"):
            source.at += 1
            closers.pop()
            wants = "next"
        elif wants in ("value", "value or end"):
            if c in "{[":
                if len(closers) == MAX_DEPTH:
                    return False
                source.at += 1
                closers.append("}" if c == "{" else "]")
                wants = "key or end" if c == "{" else "value or end"
                continue
            if not (yield from _scalar(source, c)):
                return False
            wants = "next"
        elif wants in ("key", "key or end") and c == '"':
            if not (yield from string(source)):
                return False
            wants = "colon"
            continue
        elif wants == "colon" and c == ":":
            source.at += 1
            wants = "value"
            continue
        elif wants == "next" and c == ",":
            source.at += 1
            wants = "key" if closers[-1] == "}" else "value"
            continue
        else:
            return False
        if not closers:
            return True


def _scalar(source: Source, first: str) -> Steps[bool]:
    if first == '"':
        return (yield from string(source))
    if first in _LITERALS:
        return (yield from source.constant(_LITERALS[first]))
    number = yield from source.run(_OF_NUMBERS, _LONGEST_NUMBER)
    return _NUMBER.fullmatch(number) is not None
