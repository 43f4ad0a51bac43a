"""The chat format: what clients send and receive. Pure functions; no server, model or account is known here."""
