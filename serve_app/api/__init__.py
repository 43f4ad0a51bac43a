"""The chat format: requests and replies on the wire. Pure functions, independent of server, model and account."""
