"""The ledger's tables, the same on SQLite and PostgreSQL. The migrations must lead to exactly this (a test compares).

Money is integer nano-units, times are Unix seconds, days are YYYY-MM-DD in UTC.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# One row. Whoever writes locks it first and holds it until the commit, so versions and entry numbers become visible
# in their order: a reader that has seen version v can never find a smaller one later.
head = Table(
    "ledger_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),  # the last change of an account or key
    Column("entry", BigInteger, nullable=False),  # the last journal entry; their numbers have no gaps
    Column("audit", BigInteger, nullable=False, server_default=text("0")),  # the last record of the audit log, likewise
    CheckConstraint("id = 1", name="one_row"),
)

accounts = Table(
    "accounts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("active", Boolean, nullable=False),
    Column("currency", Text, nullable=False),
    # Always the sums of the postings to customer:{id}:granted and customer:{id}:topped_up.
    Column("granted", BigInteger, nullable=False),
    Column("topped_up", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False, index=True),
    Column("created_at", Double, nullable=False),
    Column("rpm", BigInteger),
    Column("tpm", BigInteger),
    Column("concurrency", BigInteger),
    Column("weight", BigInteger),
    Column("idempotency_key", Text, unique=True),
    CheckConstraint("granted >= 0", name="granted_not_negative"),
    CheckConstraint("topped_up >= 0", name="topped_up_not_negative"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("digest", Text, nullable=False, unique=True),
    Column("hint", Text, nullable=False),
    Column("active", Boolean, nullable=False),
    Column("version", BigInteger, nullable=False, index=True),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("models", Text),  # a JSON array of identifiers; null: all
    Column("rpm", BigInteger),
    Column("tpm", BigInteger),
    Column("concurrency", BigInteger),
    Column("budget", BigInteger),  # nano-units a period
    Column("budget_period", Text),  # "day" or "month", null where the budget is
    Column("expires_at", Double),
)

# What a key with a budget has been charged in a period of its kind, YYYY-MM-DD or YYYY-MM: always the sum of its usage
# rows. Removed and counted anew when the kind changes.
key_spend = Table(
    "key_spend",
    metadata,
    Column("key_id", Text, ForeignKey("api_keys.id"), primary_key=True),
    Column("period", Text, primary_key=True),
    Column("charged", BigInteger, nullable=False),
    CheckConstraint("charged >= 0", name="charged_not_negative"),
)

price_versions = Table(  # append-only
    "price_versions",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("model", Text, nullable=False),
    Column("input", BigInteger, nullable=False),  # nano-units per token, as the next two
    Column("cached_input", BigInteger, nullable=False),
    Column("output", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("model", "input", "cached_input", "output"),
)

journal_entries = Table(  # append-only
    "journal_entries",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("memo", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("idempotency_key", Text),
    UniqueConstraint("account_id", "idempotency_key"),
    CheckConstraint("kind IN ('top_up', 'grant', 'charge', 'correction', 'expiry')", name="kind"),
    Index("ix_journal_entries_account_id_id", "account_id", "id"),
)

postings = Table(  # append-only
    "postings",
    metadata,
    Column("entry_id", BigInteger, ForeignKey("journal_entries.id"), primary_key=True, autoincrement=False),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("ledger_account", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),  # what the ledger account gains; an entry's amounts sum to zero
)

grants = Table(
    "grants",
    metadata,
    Column("entry_id", BigInteger, ForeignKey("journal_entries.id"), primary_key=True, autoincrement=False),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("amount", BigInteger, nullable=False),
    Column("remaining", BigInteger, nullable=False),  # over an account's grants: accounts.granted
    Column("expires_at", Double),
    CheckConstraint("0 <= remaining AND remaining <= amount", name="remaining_within_amount"),
)
Index(
    "ix_grants_left",
    grants.c.account_id,
    sqlite_where=text("remaining > 0"),
    postgresql_where=text("remaining > 0"),
)

usage = Table(  # append-only
    "usage",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("key_id", Text, ForeignKey("api_keys.id"), nullable=False),
    Column("model", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("price_version", BigInteger, ForeignKey("price_versions.id"), nullable=False),
    Column("day", Text, nullable=False),  # of finished_at
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("charged", BigInteger, nullable=False),
    Column("uncollected", BigInteger, nullable=False),  # what the balance did not cover
    Column("outcome", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("finished_at", Double, nullable=False),
    Column("settled_at", Double, nullable=False),
    Column("entry_id", BigInteger, ForeignKey("journal_entries.id"), unique=True),  # null: nothing was charged
    CheckConstraint("charged >= 0", name="charged_not_negative"),
    CheckConstraint("uncollected >= 0", name="uncollected_not_negative"),
    CheckConstraint("0 <= cached_tokens AND cached_tokens <= prompt_tokens", name="cached_within_prompt"),
    CheckConstraint("completion_tokens >= 0", name="completion_not_negative"),
    Index("ix_usage_account_id_finished_at_request_id", "account_id", "finished_at", "request_id"),
)

usage_daily = Table(
    "usage_daily",
    metadata,
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("day", Text, primary_key=True),
    Column("key_id", Text, ForeignKey("api_keys.id"), primary_key=True),
    Column("model", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("charged", BigInteger, nullable=False),
    Column("uncollected", BigInteger, nullable=False),
)

replies = Table(
    "replies",
    metadata,
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("request_id", Text, ForeignKey("usage.request_id"), nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
)

audit_log = Table(  # append-only
    "audit_log",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("detail", Text, nullable=False),  # a JSON object
    Column("request_id", Text),
    Column("address", Text),
    Index("ix_audit_log_account_id_id", "account_id", "id"),
)

#: Tables whose rows are never changed or removed; triggers refuse it (migrations 0002, 0004, 0006).
APPEND_ONLY = (price_versions, journal_entries, postings, usage, audit_log)
