"""Alembic's environment and revisions; `serve_app.ledger.database.migrate` runs them."""
