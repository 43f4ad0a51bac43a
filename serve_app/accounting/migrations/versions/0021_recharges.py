"""Recharging of accounts by themselves, its attempts, and the reason in a notice that it is paused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_table(
        "recharges",
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("threshold", sa.BigInteger(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("monthly_cap", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("customer", sa.Text()),
        sa.Column("method", sa.Text()),
        sa.Column("setup_id", sa.Text()),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("account_id", name="pk_recharges"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_recharges_account_id"),
        sa.CheckConstraint("state IN ('off', 'on', 'paused')", name=op.f("ck_recharges_state")),
        sa.CheckConstraint("threshold >= 0", name=op.f("ck_recharges_threshold_not_negative")),
        sa.CheckConstraint("0 < amount AND amount <= monthly_cap", name=op.f("ck_recharges_amount_within_cap")),
    )
    on = sa.text("state = 'on'")
    op.create_index("ix_recharges_on", "recharges", ["account_id"], sqlite_where=on, postgresql_where=on)
    op.create_table(
        "recharge_attempts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("customer", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Double()),
        sa.PrimaryKeyConstraint("id", name="pk_recharge_attempts"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_recharge_attempts_account_id"),
        sa.CheckConstraint("state IN ('open', 'succeeded', 'failed')", name=op.f("ck_recharge_attempts_state")),
        sa.CheckConstraint("amount > 0", name=op.f("ck_recharge_attempts_amount_positive")),
    )
    op.create_index(
        "ix_recharge_attempts_account_id_period_created_at", "recharge_attempts", ["account_id", "period", "created_at"]
    )
    still_open = sa.text("state = 'open'")
    op.create_index(
        "ix_recharge_attempts_open",
        "recharge_attempts",
        ["account_id"],
        unique=True,
        sqlite_where=still_open,
        postgresql_where=still_open,
    )
    op.create_index(
        "ix_recharge_attempts_due",
        "recharge_attempts",
        ["next_at"],
        sqlite_where=still_open,
        postgresql_where=still_open,
    )
    op.add_column("notices", sa.Column("detail", sa.Text(), nullable=False, server_default=sa.text("''")))
