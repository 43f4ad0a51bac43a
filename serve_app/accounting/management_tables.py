"""The table of management keys, of the ledger's schema."""

from __future__ import annotations

from sqlalchemy import Column, Double, ForeignKey, Table, Text

from serve_app.accounting.schema import metadata

management_keys = Table(
    "management_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("digest", Text, nullable=False, unique=True),
    Column("hint", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
)
