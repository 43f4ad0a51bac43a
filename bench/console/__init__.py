"""Benchmarks of the console: its cost for chat requests, and how fast its pages appear."""
