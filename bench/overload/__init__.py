"""The real service under three times the load that it can carry: goodput, shares by weight, waits, refusals."""
