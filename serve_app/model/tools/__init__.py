"""Tools and reasoning: what goes into a model's messages, and what its replies mean."""
