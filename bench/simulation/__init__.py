"""Simulates a backend with the service's own limits. Replicas are modelled only by the time that they take."""
