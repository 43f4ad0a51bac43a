"""Complete replies are kept for a day, for retries under the same idempotency key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "replies",
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_replies_account_id"),
        sa.ForeignKeyConstraint(["request_id"], ["usage.request_id"], name="fk_replies_request_id"),
        sa.PrimaryKeyConstraint("account_id", "idempotency_key", name="pk_replies"),
    )
    op.create_index("ix_replies_created_at", "replies", ["created_at"])
