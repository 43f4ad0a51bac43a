"""The real service under three times its capacity: goodput, shares by weight, waits, refusals."""
