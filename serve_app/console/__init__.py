"""The web console: people sign in and manage their accounts. It reaches the ledger only through contracts."""
