"""`make serve`: a whole service on one machine, from preflight to the last process gone."""
