"""Benchmark of routing among a backend's replicas: cached prompts, waits, load and fairness of each router."""
