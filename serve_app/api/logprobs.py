"""Log-probabilities as the wire shows them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Final, Protocol

LOWEST: Final = -9999.0  # what the format says of a token that has no chance at all: JSON knows no infinity


class ToldToken(Protocol):
    """A token of a reply and how likely it was."""

    @property
    def text(self) -> str:
        """Its bytes as text, U+FFFD for parts of characters."""

    @property
    def raw(self) -> bytes:
        """Its exact bytes."""

    @property
    def logprob(self) -> float:
        """A natural logarithm."""

    @property
    def top(self) -> Sequence[ToldToken]:
        """The likeliest tokens at its place, likeliest first."""


def logprobs_object(tokens: Sequence[ToldToken]) -> dict[str, Any]:
    """The `logprobs` object of a choice. The bytes of its tokens, put together, spell the text."""
    content = [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _entry(token: ToldToken) -> dict[str, Any]:
    logprob = token.logprob if isfinite(token.logprob) else LOWEST
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}
