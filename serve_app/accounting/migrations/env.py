"""Alembic's entry: runs the revisions on the connection that the caller has opened, in the caller's transaction."""

from __future__ import annotations

from alembic import context

from serve_app.accounting.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # on SQLite too: the engine begins transactions itself
)
context.run_migrations()
