"""Benchmarks of the console: what it costs, and how soon its pages appear."""
