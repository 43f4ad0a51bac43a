"""Wire formats: checks requests and encodes replies. Pure functions, independent of server, model and account."""
