"""What a streamed token costs on its way from an engine to a client, and when it arrives."""
