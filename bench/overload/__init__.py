"""Measures the real service under three times the load it can serve: goodput, shares by weight, waits, refusals."""
