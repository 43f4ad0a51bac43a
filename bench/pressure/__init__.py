"""A day of thousands of accounts on a simulated backend, through the service's own admission and pressure control."""
