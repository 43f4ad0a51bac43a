"""Kills processes of the whole service at random, under load, and proves that its books stay exact: `make chaos`."""
