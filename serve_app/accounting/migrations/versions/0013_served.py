"""What is served beside `config.yaml`: traffic and prices, whose rows stay as they are, identifiers and backends."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

APPEND_ONLY = ("served_traffic", "served_prices")
Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "served_traffic",
        sa.Column("version", Number, autoincrement=False, nullable=False),
        sa.Column("identifier", sa.Text(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("before", sa.BigInteger()),
        sa.Column("undoes", sa.BigInteger()),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_served_traffic"),
    )
    op.create_index("ix_served_traffic_identifier_version", "served_traffic", ["identifier", "version"])
    op.create_table(
        "served_prices",
        sa.Column("version", Number, autoincrement=False, nullable=False),
        sa.Column("identifier", sa.Text(), nullable=False),
        sa.Column("effective_at", sa.Double(), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("cached_input", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_served_prices"),
    )
    op.create_table(
        "served_models",
        sa.Column("identifier", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double()),
        sa.PrimaryKeyConstraint("identifier", name="pk_served_models"),
    )
    op.create_table(
        "served_backends",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("args", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("retired_at", sa.Double()),
        sa.PrimaryKeyConstraint("name", name="pk_served_backends"),
    )
    if op.get_bind().dialect.name == "sqlite":
        for table in APPEND_ONLY:
            for change in ("UPDATE", "DELETE"):
                op.execute(
                    f"CREATE TRIGGER {table}_no_{change.lower()} BEFORE {change} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
                )
        return
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION ledger_append_only()"
        )
