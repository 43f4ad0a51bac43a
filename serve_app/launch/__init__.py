"""`make serve`: runs a whole service on one machine, from preflight until its last process has ended."""
