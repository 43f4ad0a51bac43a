"""Measures the cost and the delay of streamed tokens from the engine to the client."""
