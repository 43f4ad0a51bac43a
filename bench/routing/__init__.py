"""How calls are divided among a backend's replicas: cached prompts, waits, load and fairness of each router."""
