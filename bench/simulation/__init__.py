"""Simulates a backend with the service's own limits. Replicas only take time to start and to compute."""
