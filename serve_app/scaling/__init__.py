"""How many replicas a backend needs, and what that would have cost: the rule, and a cluster to try it on."""
