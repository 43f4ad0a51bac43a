"""Each grant is kept apart with what is left of it, so that it can expire."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

KINDS = "kind IN ('top_up', 'grant', 'charge', 'correction', 'expiry')"

# Charges took from all grants as one sum. Taking the oldest to be spent first, what an account has left is in its
# newest grants: each holds what the newer ones could not.
FILL = r"""
INSERT INTO grants (entry_id, account_id, amount, remaining)
SELECT id, account_id, amount, CASE WHEN rest <= 0 THEN 0 WHEN rest >= amount THEN amount ELSE rest END
FROM (
    SELECT
        entry.id,
        entry.account_id,
        posting.amount,
        account.granted + posting.amount
            - SUM(posting.amount) OVER (PARTITION BY entry.account_id ORDER BY entry.id DESC) AS rest
    FROM journal_entries AS entry
    JOIN accounts AS account ON account.id = entry.account_id
    JOIN postings AS posting
        ON posting.entry_id = entry.id AND posting.ledger_account = 'customer:' || entry.account_id || '\:granted'
    WHERE entry.kind = 'grant'
) AS newest
"""


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _rebuild_journal()
    else:
        op.drop_constraint(op.f("ck_journal_entries_kind"), "journal_entries")
        op.create_check_constraint(op.f("ck_journal_entries_kind"), "journal_entries", KINDS)
    op.create_table(
        "grants",
        sa.Column("entry_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("remaining", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.CheckConstraint("0 <= remaining AND remaining <= amount", name=op.f("ck_grants_remaining_within_amount")),
        sa.ForeignKeyConstraint(["entry_id"], ["journal_entries.id"], name="fk_grants_entry_id"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_grants_account_id"),
        sa.PrimaryKeyConstraint("entry_id", name="pk_grants"),
    )
    op.create_index("ix_grants_account_id", "grants", ["account_id"])
    op.create_index(
        "ix_grants_left",
        "grants",
        ["account_id"],
        sqlite_where=sa.text("remaining > 0"),
        postgresql_where=sa.text("remaining > 0"),
    )
    op.execute(FILL)


def _rebuild_journal() -> None:
    """SQLite changes a check only by writing the table anew (https://www.sqlite.org/lang_altertable.html#otheralter).

    `Database.migrate` has switched foreign keys off and compares them before it commits.
    """
    op.create_table(
        "journal_entries_new",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.CheckConstraint(KINDS, name=op.f("ck_journal_entries_kind")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_journal_entries_account_id"),
        sa.PrimaryKeyConstraint("id", name="pk_journal_entries"),
        sa.UniqueConstraint("account_id", "idempotency_key", name="uq_journal_entries_account_id_idempotency_key"),
    )
    columns = "id, kind, account_id, memo, created_at, idempotency_key"
    op.execute(f"INSERT INTO journal_entries_new ({columns}) SELECT {columns} FROM journal_entries")
    op.drop_table("journal_entries")  # and with it its index and triggers
    op.rename_table("journal_entries_new", "journal_entries")
    op.create_index("ix_journal_entries_account_id_id", "journal_entries", ["account_id", "id"])
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER journal_entries_no_{change.lower()} BEFORE {change} ON journal_entries "
            "BEGIN SELECT RAISE(ABORT, 'journal_entries is append-only'); END"
        )
