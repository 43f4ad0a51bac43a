"""Alembic's environment and revisions; `serve_app.accounting.database.migrate` runs them."""
