"""The gateway process: accepts HTTP and takes each request through limiter, model and ledger."""
