"""Credits that wait for a second operator, and what became of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "pending_credits",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("decided_by", sa.Text()),
        sa.Column("decided_at", sa.Double()),
        sa.Column("approved", sa.Boolean()),
        sa.PrimaryKeyConstraint("id", name="pk_pending_credits"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_pending_credits_account_id"),
    )
