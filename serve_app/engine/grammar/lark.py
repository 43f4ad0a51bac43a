"""The basic elements of a grammar in Lark: texts, special tokens and characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from serve_app.engine.errors import UnsupportedGrammar


def constant(text: str, special: Mapping[str, int]) -> str:
    """A constant text. Special tokens in it are written as ids, because no bytes spell them."""
    names = sorted((re.escape(name) for name in special), key=len, reverse=True)
    parts = re.split(f"({'|'.join(names)})", text) if names else [text]
    return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p, ensure_ascii=False) for p in parts if p)


def regex(text: str) -> str:
    """A regular expression that matches exactly this text, also valid inside a character class."""
    plain = text.encode(errors="replace").decode()
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in plain)


def pattern(expression: str) -> str:
    """A regular expression written by a client, as a Lark terminal."""
    if not expression:
        return '""'
    escaped = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # characters that would end the terminal
    inner = re.sub(r"\\.|/|\n", lambda found: escaped.get(found[0], found[0]), expression, flags=re.DOTALL)
    return f"/{inner}/"


def special_id(text: str, special: Mapping[str, int]) -> int | None:
    """The id of the special token with this name; None for plain text.

    Raises:
        UnsupportedGrammar: the text contains a special token's name and other text.
    """
    if text in special:
        return special[text]
    if inside := next((name for name in special if name and name in text), None):
        raise UnsupportedGrammar(f"{text!r} must be a special token or contain none, but contains {inside}")
    return None


def none_of(texts: Iterable[str]) -> str:
    """A regular expression, with both anchors and without look-around, that matches every text except these."""
    return f"^({_rest(sorted(set(texts)))})$"


def _rest(texts: list[str]) -> str:
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    if not by_first:  # the only text to exclude is the empty one
        return "(?s:.+)"
    ways = [] if "" in texts else [""]
    ways.append(f"[^{''.join(map(regex, by_first))}](?s:.*)")
    return "|".join([*ways, *(f"{regex(first)}({_rest(rest)})" for first, rest in by_first.items())])
