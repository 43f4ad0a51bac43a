"""The defensive load test of the service: hostile clients on loopback while ordinary clients measure their latency."""
