"""Sign-in links, recovery codes, passkeys, and the inviter of an invitation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("invitations", sa.Column("invited_by", sa.Text()))
    op.create_table(
        "sign_in_links",
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), primary_key=True),
        sa.Column("digest", sa.Text(), nullable=False, unique=True),
        sa.Column("expires_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "recovery_codes",
        sa.Column("digest", sa.Text(), primary_key=True),
        sa.Column("user_id", sa.Text(), sa.ForeignKey("users.id"), nullable=False, index=True),
    )
    op.create_table(
        "passkeys",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("user_id", sa.Text(), sa.ForeignKey("users.id"), nullable=False, index=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("public_key", sa.Text(), nullable=False),
        sa.Column("sign_count", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double()),
    )
