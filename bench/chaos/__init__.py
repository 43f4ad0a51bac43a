"""Proofs that need the whole service: books that stay exact while its processes are killed at random.

`python -m bench.chaos --help` lists what can be done to it.
"""
