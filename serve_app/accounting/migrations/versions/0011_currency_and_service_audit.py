"""The ledger has one currency. The audit log also has records of the service as a whole, with an empty account."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    # Null until a release that knows it starts: that release compares it with the accounts first.
    op.add_column("ledger_head", sa.Column("currency", sa.Text()))
    if op.get_bind().dialect.name == "sqlite":
        _rebuild_audit_log()
    else:
        op.drop_constraint("fk_audit_log_account_id", "audit_log", type_="foreignkey")


def _rebuild_audit_log() -> None:
    """SQLite drops a constraint only by writing the table anew, as migration 0004 does."""
    op.create_table(
        "audit_log_new",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text()),
        sa.Column("address", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    columns = "id, at, actor, action, subject, account_id, detail, request_id, address"
    op.execute(f"INSERT INTO audit_log_new ({columns}) SELECT {columns} FROM audit_log")
    op.drop_table("audit_log")  # and with it its index and triggers
    op.rename_table("audit_log_new", "audit_log")
    op.create_index("ix_audit_log_account_id_id", "audit_log", ["account_id", "id"])
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER audit_log_no_{change.lower()} BEFORE {change} ON audit_log "
            "BEGIN SELECT RAISE(ABORT, 'audit_log is append-only'); END"
        )
