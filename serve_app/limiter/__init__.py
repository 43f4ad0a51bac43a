"""Who may run now: the rules and their process."""
