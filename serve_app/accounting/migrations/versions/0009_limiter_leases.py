"""One limiter admits for a shard at a time: leases with epochs, and the open holds that a successor must know."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "limiter_leases",
        sa.Column("shards", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("shard", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("renewals", sa.BigInteger(), nullable=False),
        sa.Column("lasts_s", sa.Double(), nullable=False),
        sa.Column("released", sa.Boolean(), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("shards", "shard", name="pk_limiter_leases"),
    )
    op.create_table(
        "limiter_holds",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("terms", sa.Text(), nullable=False),
        sa.Column("posted_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_limiter_holds"),
    )
    op.create_index("ix_limiter_holds_owner", "limiter_holds", ["owner"])
