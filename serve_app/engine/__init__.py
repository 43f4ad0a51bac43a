"""Continuous-batching inference over any decoder-only transformers model: tokens in, tokens out."""
