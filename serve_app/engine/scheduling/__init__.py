"""Decides what each step computes: queues, fair shares, KV blocks, prefixes and guesses; no torch."""
