"""The books: the ledger and the accounting process."""
