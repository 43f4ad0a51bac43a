"""The int8 forward pass on the CPU."""
