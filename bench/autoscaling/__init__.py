"""Simulated days of traffic on a cluster, with the service's scaling rule and with other policies."""
