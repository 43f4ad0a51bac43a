"""Simulates a day of thousands of accounts on one backend, with the service's own admission and pressure control."""
