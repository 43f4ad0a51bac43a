"""On PYTHONPATH this folder is a `sitecustomize` that takes one speed-up out of every Python process of a service."""
