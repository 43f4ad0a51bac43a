"""The benchmark of the path without the model: the whole service over a stub, a bare Serve app, and a peer gateway."""
