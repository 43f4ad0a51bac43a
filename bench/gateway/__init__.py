"""The benchmark of everything except the model: the service with a stub, a bare Serve app, and a peer gateway."""
