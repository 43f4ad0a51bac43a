"""How many tokens a conversation has, about, before a tokenizer has counted them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Final

# The service's published ratios: 0.3 token for an English character, 0.6 for a Chinese one.
TOKENS_PER_ASCII: Final = 0.3
TOKENS_PER_OTHER: Final = 0.6
TOKENS_PER_MESSAGE: Final = 6  # what a chat template puts around a message: its role and the marks of begin and end
TOKENS_PER_TOOLS: Final = 120  # what a chat template says about calling functions, whichever there are
TOKENS_PER_PROMPT: Final = 8  # the mark that begins the reply, and what a template may add in front
MARGIN: Final = 1.1


def estimate_prompt_tokens(messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """Tokens of a normalised conversation with its tools, at least 1, on the high side for everyday text.

    Every character outside ASCII counts like a Chinese one: accents, punctuation and other scripts are seldom
    cheaper. The tokenizer's exact count replaces the estimate before anything is generated, so an estimate only has
    to be near. Linear in the text, at the speed of an encoder: 1 MB takes about a millisecond.
    """
    tokens = float(TOKENS_PER_PROMPT)
    for message in messages:
        tokens += (
            TOKENS_PER_MESSAGE
            + _tokens_of_text(message.get("content") or "")
            + _tokens_of_text(message.get("name") or "")
        )
        for call in message.get("tool_calls") or ():
            function = call["function"]
            tokens += TOKENS_PER_MESSAGE + _tokens_of_text(function["name"]) + _tokens_of_text(function["arguments"])
    if tools:
        tokens += TOKENS_PER_TOOLS + _tokens_of_text(json.dumps(tools, ensure_ascii=False))
    return ceil(tokens * MARGIN)


def _tokens_of_text(text: str) -> float:
    # Encoding to ASCII while leaving the rest out counts both kinds without a Python loop over characters.
    plain = len(text) if text.isascii() else len(text.encode("ascii", "ignore"))
    return plain * TOKENS_PER_ASCII + (len(text) - plain) * TOKENS_PER_OTHER
