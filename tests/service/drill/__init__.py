"""Takes whole nodes from a Ray cluster under load, and proves that calls, streams and books outlive them."""
