"""Estimates the tokens of a conversation before any tokenizer has seen it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Final

# The service's published ratios: 0.3 tokens per English character, 0.6 per Chinese character.
TOKENS_PER_ASCII: Final = 0.3
TOKENS_PER_OTHER: Final = 0.6
TOKENS_PER_MESSAGE: Final = 6  # added around a message by a chat template: its role, and the begin and end markers
TOKENS_PER_TOOLS: Final = 120  # a chat template's text about how to call functions, apart from the functions themselves
TOKENS_PER_PROMPT: Final = 8  # the marker that begins the reply, and any text that a template adds in front
MARGIN: Final = 1.1


def estimate_prompt_tokens(messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """Estimates the tokens of a conversation and its tools: at least 1, and usually too high for everyday text.

    Every character outside ASCII counts as a Chinese character, because accents, punctuation and other scripts seldom
    need fewer tokens. The tokenizer's exact count replaces the estimate before anything is generated, so the estimate
    only has to be close. The time is proportional to the text: 1 MB takes about a millisecond.
    """
    tokens = float(TOKENS_PER_PROMPT)
    for message in messages:
        tokens += (
            TOKENS_PER_MESSAGE
            + _tokens_of_text(message.get("content") or "")
            + _tokens_of_text(message.get("name") or "")
            + _tokens_of_text(message.get("reasoning_content") or "")
        )
        for call in message.get("tool_calls") or ():
            function = call["function"]
            tokens += TOKENS_PER_MESSAGE + _tokens_of_text(function["name"]) + _tokens_of_text(function["arguments"])
    if tools:
        tokens += TOKENS_PER_TOOLS + _tokens_of_text(json.dumps(tools, ensure_ascii=False))
    return ceil(tokens * MARGIN)


def estimate_raw_tokens(prompts: Iterable[str | Sequence[int]], suffix: str | None = None) -> int:
    """Estimates the tokens of prompts that no template renders. The suffix is part of each."""
    tokens = 0.0
    for prompt in prompts:
        tokens += len(prompt) / MARGIN if not isinstance(prompt, str) else _tokens_of_text(prompt) + TOKENS_PER_PROMPT
        tokens += _tokens_of_text(suffix or "")
    return ceil(tokens * MARGIN)


def _tokens_of_text(text: str) -> float:
    # Encoding to ASCII and ignoring the rest counts both kinds without a Python loop over characters.
    plain = len(text) if text.isascii() else len(text.encode("ascii", "ignore"))
    return plain * TOKENS_PER_ASCII + (len(text) - plain) * TOKENS_PER_OTHER
