"""A folder for PYTHONPATH. Its `sitecustomize` removes one speed-up from every process of a service."""
