"""The check of everything that needs a GPU, in at most eight minutes on one GPU: `make gpu-check`."""
