"""Checkpoints of the check, archives, numbers for usage rows without a charge, and indexes of periodic queries.

Only adds: the release before runs on this schema. A trigger numbers the rows that it writes, too. Rows without a
number that PostgreSQL holds from before get theirs from the first check (`checkpoints.number_rows`), a thousand at a
time, so that no lock is held for all of them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "charged", "uncollected")
USAGE_COLUMNS = (
    "request_id, account_id, key_id, model, backend, price_version, day, prompt_tokens, cached_tokens, "
    "completion_tokens, charged, uncollected, outcome, started_at, finished_at, settled_at, entry_id"
)
ARCHIVED = "(SELECT coalesce(max({0}), 0) FROM archives WHERE exported_at IS NOT NULL)"
ARCHIVED_ENTRY, ARCHIVED_NUMBER = ARCHIVED.format("entry"), ARCHIVED.format("number")
#: By table: the rows that no archive holds. Where a column is null, the comparison must not be.
NOT_ARCHIVED = {
    "journal_entries": f"OLD.kind <> 'charge' OR OLD.id > {ARCHIVED_ENTRY}",
    "postings": f"OLD.entry_id > {ARCHIVED_ENTRY}",
    "usage": f"CASE WHEN OLD.entry_id IS NULL THEN OLD.number IS NULL OR OLD.number > {ARCHIVED_NUMBER} "
    f"ELSE OLD.entry_id > {ARCHIVED_ENTRY} END",
}


def upgrade() -> None:
    _tables()
    op.add_column("usage", sa.Column("number", sa.BigInteger()))
    if op.get_bind().dialect.name == "sqlite":
        _sqlite_triggers()
    else:
        _postgresql_triggers()
    _partial_index("ix_usage_number", "usage", ["number"], "number IS NOT NULL", unique=True)
    _partial_index("ix_usage_unnumbered", "usage", ["request_id"], "number IS NULL AND entry_id IS NULL")
    _partial_index("ix_grants_due", "grants", ["expires_at", "entry_id"], "remaining > 0 AND expires_at IS NOT NULL")
    op.create_index("ix_usage_daily_day", "usage_daily", ["day"])
    op.create_index("ix_replies_request_id", "replies", ["request_id"])


def _tables() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("id", Number, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("closing", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("usage_rows", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("proven_at", sa.Double()),
        sa.CheckConstraint("kind IN ('last', 'full', 'closing', 'old')", name=op.f("ck_checkpoints_kind")),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "checkpoint_balances",
        sa.Column("checkpoint_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("ledger_account", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_balances_checkpoint_id"),
        sa.PrimaryKeyConstraint("checkpoint_id", "ledger_account", name="pk_checkpoint_balances"),
    )
    op.create_table(
        "checkpoint_daily",
        sa.Column("checkpoint_id", sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("account_id", "day", "key_id", "model")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("requests", *COUNTS)),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_daily_checkpoint_id"),
        sa.PrimaryKeyConstraint("checkpoint_id", "account_id", "day", "key_id", "model", name="pk_checkpoint_daily"),
    )
    op.create_table(
        "checkpoint_differences",
        sa.Column("checkpoint_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_differences_checkpoint_id"),
        sa.PrimaryKeyConstraint("checkpoint_id", "kind", "subject", name="pk_checkpoint_differences"),
    )
    op.create_table(
        "archives",
        sa.Column("checkpoint_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("before", sa.Text(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.Text()),
        sa.Column("exported_at", sa.Double()),
        sa.Column("removed_at", sa.Double()),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_archives_checkpoint_id"),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_archives"),
        sa.UniqueConstraint("before", name="uq_archives_before"),
    )


def _partial_index(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    op.create_index(name, table, columns, unique=unique, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def _sqlite_triggers() -> None:
    op.execute("DROP TRIGGER usage_no_update")
    op.execute(
        "UPDATE usage SET number = free.place FROM (SELECT rowid AS line, row_number() OVER (ORDER BY rowid) AS place "
        "FROM usage WHERE entry_id IS NULL) AS free WHERE usage.rowid = free.line"
    )
    # Numbers are never given twice, also not when an archive has taken the highest away.
    op.execute(
        "CREATE TRIGGER usage_number AFTER INSERT ON usage WHEN NEW.entry_id IS NULL AND NEW.number IS NULL BEGIN "
        "UPDATE usage SET number = 1 + max((SELECT coalesce(max(number), 0) FROM usage), "
        "(SELECT coalesce(max(number), 0) FROM archives)) WHERE request_id = NEW.request_id; END"
    )
    refuse = "BEGIN SELECT RAISE(ABORT, '{0} is append-only'); END"
    op.execute(f"CREATE TRIGGER usage_no_update BEFORE UPDATE OF {USAGE_COLUMNS} ON usage {refuse.format('usage')}")
    op.execute(
        "CREATE TRIGGER usage_no_renumber BEFORE UPDATE OF number ON usage "
        f"WHEN OLD.number IS NOT NULL OR OLD.entry_id IS NOT NULL {refuse.format('usage')}"
    )
    for table, kept in NOT_ARCHIVED.items():
        op.execute(f"DROP TRIGGER {table}_no_delete")
        op.execute(f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} WHEN {kept} {refuse.format(table)}")


def _postgresql_triggers() -> None:
    op.execute("CREATE SEQUENCE usage_number")
    op.execute(
        "CREATE FUNCTION ledger_number_usage() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.number := nextval('usage_number'); RETURN NEW; END $$"
    )
    op.execute(
        "CREATE TRIGGER usage_number BEFORE INSERT ON usage FOR EACH ROW "
        "WHEN (NEW.entry_id IS NULL AND NEW.number IS NULL) EXECUTE FUNCTION ledger_number_usage()"
    )
    for table, kept in NOT_ARCHIVED.items():
        columns = f" OF {USAGE_COLUMNS}" if table == "usage" else ""
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE{columns} OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION ledger_append_only()"
        )
        # A condition of a trigger may not ask another table.
        op.execute(
            f"CREATE FUNCTION ledger_keep_{table}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF ({kept}) "
            "THEN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END IF; RETURN OLD; END $$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} FOR EACH ROW "
            f"EXECUTE FUNCTION ledger_keep_{table}()"
        )
    op.execute(
        "CREATE TRIGGER usage_no_renumber BEFORE UPDATE OF number ON usage FOR EACH ROW "
        "WHEN (OLD.number IS NOT NULL OR OLD.entry_id IS NOT NULL) EXECUTE FUNCTION ledger_append_only()"
    )
