"""Benchmark of routers among a backend's replicas: cached prompts, waits, load and fairness."""
