"""Management keys of accounts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "management_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name="pk_management_keys"),
        sa.UniqueConstraint("digest", name="uq_management_keys_digest"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_management_keys_account_id"),
    )
    op.create_index("ix_management_keys_account_id", "management_keys", ["account_id"])
