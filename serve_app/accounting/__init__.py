"""The books: the ledger and its process."""
