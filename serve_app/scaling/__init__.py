"""Decides how many replicas a backend needs."""
