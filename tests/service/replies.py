"""Counts and replies of the tests' backends, `held` and `broken` of `config.yaml`. Without Ray, for the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PLACES = 20  # requests that a replica of `held` takes at once
SECRET = "a path such as /srv/secret/weights.bin"  # in the error of `broken`


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A prompt of `held`."""
    return "\n".join(message.get("content") or "" for message in messages)


def prompt_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the token count of `held` for a prompt."""
    return len(prompt_text(messages).encode())


def reply(tokens: int, after: int = 0) -> str:
    """Returns the text of a `held` reply up to this token, without the first ones."""
    return "".join(f"w{number} " for number in range(after + 1, tokens + 1))
