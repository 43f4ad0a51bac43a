"""A load test of the service's defences: hostile clients on loopback, while ordinary clients measure their latency."""
