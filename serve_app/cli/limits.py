"""Limits as they are typed: whole numbers, or the word that takes a limit away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from serve_app.cli.errors import usage_error

LIMITS = ("rpm", "tpm", "concurrency")
MOST_WEIGHT = 10_000

LimitOption = Annotated[str | None, typer.Option(metavar="N|default", help="Whole number, or `default`.")]
WeightOption = Annotated[
    str | None,
    typer.Option(metavar="N|default", help=f"Share under pressure, beside other accounts': 1 to {MOST_WEIGHT:,}."),
]


def limits_of(given: Mapping[str, str | None], reset: list[str] | None = None, *, word: str) -> dict[str, int | None]:
    """The limits that were given; None where `word` stands, or where it is one of `reset`. Raises a usage error."""
    changes = {name: _limit(name, text, word) for name, text in given.items() if text is not None}
    for name in reset or ():
        if name not in given:
            raise usage_error(f"--default {name}: must be one of {', '.join(given)}")
        if name in changes:
            raise usage_error(f"--{name} and --default {name} contradict each other")
        changes[name] = None
    return changes


def _limit(name: str, text: str, word: str) -> int | None:
    if text == word:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise usage_error(f"--{name} {text}: must be a whole number of at least 1, or `{word}`")
    if name == "weight" and int(text) > MOST_WEIGHT:
        raise usage_error(f"--weight {text}: must be at most {MOST_WEIGHT:,}")
    return int(text)
