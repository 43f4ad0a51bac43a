"""The check of everything that needs a GPU, in at most eleven minutes on one GPU: `make gpu-check`."""
