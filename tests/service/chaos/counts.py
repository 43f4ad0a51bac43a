"""Token counts of the stub. Without Ray, for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PER_PROMPT = 8  # tokens, besides one a word
CACHED_SHARE = 4  # every fourth token of a prompt is billed at the cached price


def prompt_tokens(messages: Sequence[dict[str, Any]]) -> int:
    """Returns the stub's token count for a prompt."""
    return PER_PROMPT + sum(len((message.get("content") or "").split()) for message in messages)


def cached_tokens(prompt: int) -> int:
    """Returns how many of a prompt's tokens the stub reports as cached."""
    return prompt // CACHED_SHARE
