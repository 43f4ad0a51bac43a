"""Serves calls in a model replica: chat template, tools, reasoning, choices, settlement of orphaned replies."""
