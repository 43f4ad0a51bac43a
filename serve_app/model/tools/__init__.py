"""Adds tools to a model's messages, and parses tool calls and reasoning from its replies."""
