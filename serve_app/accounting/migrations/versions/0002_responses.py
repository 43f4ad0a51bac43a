"""Stored responses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), primary_key=True),
        sa.Column("response_id", sa.Text(), primary_key=True),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False, index=True),
        sa.Column("beat_at", sa.Double()),
        sa.Column("cancelled_at", sa.Double()),
    )
