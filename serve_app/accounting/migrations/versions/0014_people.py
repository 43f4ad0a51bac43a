"""People of the console: users, memberships, roles of operators, invitations and sessions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("email", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("password", sa.Text(), nullable=False),
        sa.Column("totp_secret", sa.Text()),
        sa.Column("totp_step", sa.BigInteger(), nullable=False),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_users"),
        sa.UniqueConstraint("email", name="uq_users_email"),
    )
    op.create_table(
        "memberships",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "account_id", name="pk_memberships"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_memberships_user_id"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_memberships_account_id"),
        sa.CheckConstraint("role IN ('owner', 'member', 'billing')", name=op.f("ck_memberships_role")),
    )
    op.create_index("ix_memberships_account_id", "memberships", ["account_id"])
    op.create_table(
        "operator_roles",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", name="pk_operator_roles"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_operator_roles_user_id"),
        sa.CheckConstraint("role IN ('admin', 'support', 'finance', 'read-only')", name=op.f("ck_operator_roles_role")),
    )
    op.create_table(
        "invitations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("email", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name="pk_invitations"),
        sa.UniqueConstraint("digest", name="uq_invitations_digest"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_invitations_account_id"),
    )
    op.create_index("ix_invitations_account_id", "invitations", ["account_id"])
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
        sa.UniqueConstraint("digest", name="uq_sessions_digest"),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_sessions_user_id"),
    )
    op.create_index("ix_sessions_user_id", "sessions", ["user_id"])
