"""The operator's API and the account holder's API."""
