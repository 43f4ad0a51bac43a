"""One gateway process: HTTP in, and the walk of each request through limiter, model and ledger."""
