"""Loads models into memory: folders, hub, GGUF, placement, the int8 cache."""
