"""Words for prompts that mean nothing."""

from typing import Final

WORDS: Final = ("river", "stone", "lamp", "garden", "north", "paper", "music", "glass", "winter", "harbour")
