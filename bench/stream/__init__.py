"""Measures the cost of a streamed token from the engine to the client, and when it arrives."""
