"""Forward passes: the runners, their weights and caches; `runners` chooses."""
