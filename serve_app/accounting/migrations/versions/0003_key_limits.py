"""Accounts have a weight; keys have models, limits, a budget and an expiry of their own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("accounts", sa.Column("weight", sa.BigInteger()))
    op.add_column("api_keys", sa.Column("models", sa.Text()))
    op.add_column("api_keys", sa.Column("rpm", sa.BigInteger()))
    op.add_column("api_keys", sa.Column("tpm", sa.BigInteger()))
    op.add_column("api_keys", sa.Column("concurrency", sa.BigInteger()))
    op.add_column("api_keys", sa.Column("budget", sa.BigInteger()))
    op.add_column("api_keys", sa.Column("budget_period", sa.Text()))
    op.add_column("api_keys", sa.Column("expires_at", sa.Double()))
    op.create_table(
        "key_spend",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("charged >= 0", name=op.f("ck_key_spend_charged_not_negative")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_key_spend_key_id"),
        sa.PrimaryKeyConstraint("key_id", "period", name="pk_key_spend"),
    )
