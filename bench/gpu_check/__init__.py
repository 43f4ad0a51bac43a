"""Checks everything that needs a GPU, on one GPU in at most eleven minutes: `make gpu-check`."""
