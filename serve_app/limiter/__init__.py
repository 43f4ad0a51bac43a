"""Decides which requests may run now: the rules and their process."""
