"""Lists the tokens with which models mark the text before and after a gap that they fill.

Sources: the model cards and tokenizers of Qwen/Qwen2.5-Coder-7B, bigcode/starcoder2-3b, bigcode/santacoder,
deepseek-ai/deepseek-coder-1.3b-base and DeepSeek-V3, codellama/CodeLlama-7b-hf, google/codegemma-2b,
mistralai/Codestral-22B-v0.1 and ByteDance-Seed/Seed-Coder-8B-Base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serve_app.engine.chat import ChatRenderer


@dataclass(frozen=True, slots=True)
class GapTokens:
    """The names of a model's tokens around a gap.

    A prompt has this order: prefix token, text before, suffix token, text after, middle token. With `suffix_first`, the
    suffix token and the text after it come first. Models without a middle token continue the text before the gap.
    """

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


GAP_TOKENS: Final = (
    GapTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, CodeGemma
    GapTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    GapTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    GapTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    GapTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    GapTokens("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed coder
    GapTokens("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


def fill_in_prompt(chat: ChatRenderer, before: str, after: str) -> list[int] | None:
    """Returns a prompt that asks for the text between `before` and `after`, as token ids.

    Returns None if the model has no tokens for this. Names of control tokens in the two texts stay ordinary text,
    because the texts are parts of files.
    """
    for names in GAP_TOKENS:
        prefix, suffix, middle = map(chat.find_token, (names.prefix, names.suffix, names.middle))
        if prefix is None or suffix is None or (names.middle and middle is None):
            continue
        first = [prefix, *chat.tokenize(chat.literal(before))]
        second = [suffix, *chat.encode_following(after)]
        parts = second + first if names.suffix_first else first + second
        return chat.encode("") + parts + ([] if middle is None else [middle])
    return None
