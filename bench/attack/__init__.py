"""A load test of the service's defences: hostile clients attack it on loopback, while ordinary ones measure latency."""
