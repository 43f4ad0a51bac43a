"""Accounts, keys, journal and usage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    head = op.create_table(
        "ledger_head",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_ledger_head_one_row")),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_head"),
    )
    op.bulk_insert(head, [{"id": 1, "version": 0, "entry": 0}])

    op.create_table(
        "accounts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("granted", sa.BigInteger(), nullable=False),
        sa.Column("topped_up", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("rpm", sa.BigInteger()),
        sa.Column("tpm", sa.BigInteger()),
        sa.Column("concurrency", sa.BigInteger()),
        sa.Column("idempotency_key", sa.Text()),
        sa.CheckConstraint("granted >= 0", name=op.f("ck_accounts_granted_not_negative")),
        sa.CheckConstraint("topped_up >= 0", name=op.f("ck_accounts_topped_up_not_negative")),
        sa.PrimaryKeyConstraint("id", name="pk_accounts"),
        sa.UniqueConstraint("idempotency_key", name="uq_accounts_idempotency_key"),
    )
    op.create_index("ix_accounts_version", "accounts", ["version"])

    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double()),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_api_keys_account_id"),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
    )
    op.create_index("ix_api_keys_account_id", "api_keys", ["account_id"])
    op.create_index("ix_api_keys_version", "api_keys", ["version"])

    op.create_table(
        "price_versions",
        sa.Column("id", Number, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("cached_input", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_price_versions"),
        sa.UniqueConstraint(
            "model", "input", "cached_input", "output", name="uq_price_versions_model_input_cached_input_output"
        ),
    )

    op.create_table(
        "journal_entries",
        sa.Column("id", Number, autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.CheckConstraint("kind IN ('top_up', 'grant', 'charge', 'correction')", name=op.f("ck_journal_entries_kind")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_journal_entries_account_id"),
        sa.PrimaryKeyConstraint("id", name="pk_journal_entries"),
        sa.UniqueConstraint("account_id", "idempotency_key", name="uq_journal_entries_account_id_idempotency_key"),
    )
    op.create_index("ix_journal_entries_account_id_id", "journal_entries", ["account_id", "id"])

    op.create_table(
        "postings",
        sa.Column("entry_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("line", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ledger_account", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["entry_id"], ["journal_entries.id"], name="fk_postings_entry_id"),
        sa.PrimaryKeyConstraint("entry_id", "line", name="pk_postings"),
    )

    op.create_table(
        "usage",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("price_version", sa.BigInteger(), nullable=False),
        sa.Column("day", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.Column("uncollected", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=False),
        sa.Column("entry_id", sa.BigInteger()),
        sa.CheckConstraint("charged >= 0", name=op.f("ck_usage_charged_not_negative")),
        sa.CheckConstraint("uncollected >= 0", name=op.f("ck_usage_uncollected_not_negative")),
        sa.CheckConstraint(
            "0 <= cached_tokens AND cached_tokens <= prompt_tokens", name=op.f("ck_usage_cached_within_prompt")
        ),
        sa.CheckConstraint("completion_tokens >= 0", name=op.f("ck_usage_completion_not_negative")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_usage_account_id"),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_usage_key_id"),
        sa.ForeignKeyConstraint(["price_version"], ["price_versions.id"], name="fk_usage_price_version"),
        sa.ForeignKeyConstraint(["entry_id"], ["journal_entries.id"], name="fk_usage_entry_id"),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage"),
        sa.UniqueConstraint("entry_id", name="uq_usage_entry_id"),
    )
    op.create_index("ix_usage_account_id_day", "usage", ["account_id", "day"])

    op.create_table(
        "usage_daily",
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.Column("uncollected", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name="fk_usage_daily_account_id"),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_usage_daily_key_id"),
        sa.PrimaryKeyConstraint("account_id", "day", "key_id", "model", name="pk_usage_daily"),
    )
