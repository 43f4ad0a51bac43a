"""A backend without models: replicas that take time to start and to compute, under the service's own limits."""
