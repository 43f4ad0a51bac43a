"""On PYTHONPATH, this folder has a `sitecustomize` that removes one speed-up from every process of a service."""
