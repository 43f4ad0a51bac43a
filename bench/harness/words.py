"""Words for meaningless prompts."""

from typing import Final

WORDS: Final = ("river", "stone", "lamp", "garden", "north", "paper", "music", "glass", "winter", "harbour")
