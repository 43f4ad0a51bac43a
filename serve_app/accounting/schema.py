"""The ledger's tables, identical on SQLite and PostgreSQL. The migrations must produce the same tables (tested).

Money is integer nano-units, times are Unix seconds, days are YYYY-MM-DD in UTC. The limit columns are generated
from `contracts.limits`. Triggers reject changes to rows of append-only tables, and the removal of a row that is in no
archive.
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

from serve_app.contracts.limits import ACCOUNT_LIMITS, KEY_LIMITS

#: Columns of a usage row that a daily aggregate sums: tokens, and paid and unpaid nano-units.
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "charged", "uncollected")
DAILY_GROUP = ("account_id", "day", "key_id", "model")
DAILY_SUMS = ("requests", *COUNTS)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Number = BigInteger().with_variant(Integer, "sqlite")

# One row. A writer locks it first and keeps the lock until the commit, so versions and entry numbers become visible in
# order: when a reader has seen version v, no smaller version appears later.
head = Table(
    "ledger_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),  # last version assigned
    Column("entry", BigInteger, nullable=False),  # number of the last journal entry; numbers have no gaps
    Column("audit", BigInteger, nullable=False, server_default=text("0")),  # number of the last audit record; no gaps
    Column("currency", Text),  # currency of all accounts and prices; null: not set yet
    # A release runs on this schema if its last revision is this one or a later one.
    Column("runs_from", Text, nullable=False, server_default=text("'0001'")),
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
    *(Column(limit, BigInteger) for limit in ACCOUNT_LIMITS),
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
    *(Column(limit, BigInteger) for limit in KEY_LIMITS),
    Column("budget", BigInteger),  # nano-units per period
    Column("budget_period", Text),  # "day" or "month"; null if the budget is null
    Column("expires_at", Double),
    Column("tags", Text),  # a JSON array of texts; null: none
    Column("addresses", Text),  # a JSON array of CIDR networks; null: any
)

# Sums of the usage rows of keys with a budget, per budget period: a day (YYYY-MM-DD) or a month (YYYY-MM). A key's sums
# are removed and counted again when its budget's period changes.
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
    Column("id", Number, primary_key=True),
    Column("model", Text, nullable=False),
    Column("input", BigInteger, nullable=False),  # nano-units per token; likewise the next two
    Column("cached_input", BigInteger, nullable=False),
    Column("output", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("model", "input", "cached_input", "output"),
)

journal_entries = Table(  # append-only
    "journal_entries",
    metadata,
    Column("id", Number, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("memo", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("idempotency_key", Text),
    UniqueConstraint("account_id", "idempotency_key"),
    CheckConstraint("kind IN ('top_up', 'grant', 'charge', 'correction', 'expiry')", name="kind"),
    Index("ix_journal_entries_account_id_id", "account_id", "id"),
)
Index(  # without charges, which are most of the rows
    "ix_journal_entries_movements",
    journal_entries.c.account_id,
    journal_entries.c.created_at,
    sqlite_where=text("kind <> 'charge'"),
    postgresql_where=text("kind <> 'charge'"),
)

postings = Table(  # append-only
    "postings",
    metadata,
    Column("entry_id", BigInteger, ForeignKey("journal_entries.id"), primary_key=True, autoincrement=False),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("ledger_account", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),  # gain of the ledger account; an entry's amounts sum to zero
)

grants = Table(
    "grants",
    metadata,
    Column("entry_id", BigInteger, ForeignKey("journal_entries.id"), primary_key=True, autoincrement=False),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("amount", BigInteger, nullable=False),
    Column("remaining", BigInteger, nullable=False),  # over an account's grants, sums to accounts.granted
    Column("expires_at", Double),
    CheckConstraint("0 <= remaining AND remaining <= amount", name="remaining_within_amount"),
)
Index(
    "ix_grants_left",
    grants.c.account_id,
    sqlite_where=text("remaining > 0"),
    postgresql_where=text("remaining > 0"),
)
Index(
    "ix_grants_due",
    grants.c.expires_at,
    grants.c.entry_id,
    sqlite_where=text("remaining > 0 AND expires_at IS NOT NULL"),
    postgresql_where=text("remaining > 0 AND expires_at IS NOT NULL"),
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
    Column("day", Text, nullable=False),  # UTC day of finished_at
    *(Column(count, BigInteger, nullable=False) for count in COUNTS),
    Column("outcome", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("finished_at", Double, nullable=False),
    Column("settled_at", Double, nullable=False),
    Column("entry_id", BigInteger, ForeignKey("journal_entries.id"), unique=True),  # null: nothing was charged
    # Only for rows without an entry. Increases in the order of the commits, as `entry_id` does. A trigger sets it.
    Column("number", BigInteger),
    CheckConstraint("charged >= 0", name="charged_not_negative"),
    CheckConstraint("uncollected >= 0", name="uncollected_not_negative"),
    CheckConstraint("0 <= cached_tokens AND cached_tokens <= prompt_tokens", name="cached_within_prompt"),
    CheckConstraint("completion_tokens >= 0", name="completion_not_negative"),
    Index("ix_usage_account_id_finished_at_request_id", "account_id", "finished_at", "request_id"),
)
Index(
    "ix_usage_number",
    usage.c.number,
    unique=True,
    sqlite_where=text("number IS NOT NULL"),
    postgresql_where=text("number IS NOT NULL"),
)

usage_daily = Table(
    "usage_daily",
    metadata,
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("day", Text, primary_key=True, index=True),
    Column("key_id", Text, ForeignKey("api_keys.id"), primary_key=True),
    Column("model", Text, primary_key=True),
    *(Column(count, BigInteger, nullable=False) for count in DAILY_SUMS),
)

replies = Table(
    "replies",
    metadata,
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("request_id", Text, ForeignKey("usage.request_id"), nullable=False, index=True),
    Column("fingerprint", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
)

# Responses that their accounts can read and continue, until they expire.
responses = Table(
    "responses",
    metadata,
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("response_id", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False, index=True),
    Column("beat_at", Double),  # last heartbeat of the gateway that runs it in the background; null: it has ended
    Column("cancelled_at", Double),  # null: not cancelled
)

# Settlements that the ledger could not settle. A successful retry by an operator removes them.
stuck_settlements = Table(
    "stuck_settlements",
    metadata,
    Column("stuck_id", Text, primary_key=True),  # the request's id
    Column("account_id", Text, nullable=False),  # as sent: the account may not exist
    Column("settlement", Text, nullable=False),  # JSON, as in a spool; without the reply
    Column("refusal", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("first_at", Double, nullable=False),
    Column("last_at", Double, nullable=False),
    Column("tries", Integer, nullable=False),
)

audit_log = Table(  # append-only
    "audit_log",
    metadata,
    Column("id", Number, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("account_id", Text, nullable=False),  # empty: the record is about the service as a whole
    Column("detail", Text, nullable=False),  # a JSON object
    Column("request_id", Text),
    Column("address", Text),
    Index("ix_audit_log_account_id_id", "account_id", "id"),
)

# The limiter that admits for each shard: `limiter_leases.py` has the rules. Few rows.
limiter_leases = Table(
    "limiter_leases",
    metadata,
    Column("shards", Integer, primary_key=True, autoincrement=False),  # number of limiter shards of the service
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),  # a new epoch is higher than those of all rows
    Column("holder", Text, nullable=False),
    Column("renewals", BigInteger, nullable=False),
    Column("lasts_s", Double, nullable=False),  # seconds for which the holder may admit after it has sent a renewal
    Column("released", Boolean, nullable=False),
    Column("wanted", Integer, nullable=False),  # requests that wait at a limiter without the lease
)

# Open holds that the holder of the lease might not learn from its own gateways. Mostly empty.
limiter_holds = Table(
    "limiter_holds",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("account_id", Text, nullable=False),
    Column("owner", Text, nullable=False, index=True),  # gateway/shard; this gateway keeps the row up to date
    Column("terms", Text, nullable=False),  # an OpenHold as a JSON object
    Column("posted_at", Double, nullable=False),
)

# The place up to which a check has verified the books: all rows up to journal entry `entry`, and usage rows without an
# entry up to `number`. The next tables have the sums of these rows. Kinds:
# - "last": the newest checkpoint, from which the next check continues. There is one.
# - "full": a running check from the beginning.
# - "old": a replaced checkpoint.
# - "closing": represents the rows of one archive, and has the sums of only those rows.
# The other kinds begin after the closing checkpoints with ids up to `closing`, and have the sums of only later rows.
checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", Number, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("closing", BigInteger, nullable=False),  # 0: none; the sums begin with the first entry
    Column("entry", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("entries", BigInteger, nullable=False),  # number of rows read; likewise the next
    Column("usage_rows", BigInteger, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("proven_at", Double),  # null: no check has completed yet
    CheckConstraint("kind IN ('last', 'full', 'closing', 'old')", name="kind"),
    sqlite_autoincrement=True,  # ids are not reused: a check must not continue at a different checkpoint
)

checkpoint_balances = Table(
    "checkpoint_balances",
    metadata,
    Column("checkpoint_id", BigInteger, ForeignKey("checkpoints.id"), primary_key=True, autoincrement=False),
    Column("ledger_account", Text, primary_key=True),
    Column("amount", BigInteger, nullable=False),
)

checkpoint_daily = Table(
    "checkpoint_daily",
    metadata,
    Column("checkpoint_id", BigInteger, ForeignKey("checkpoints.id"), primary_key=True, autoincrement=False),
    *(Column(name, Text, primary_key=True) for name in DAILY_GROUP),
    *(Column(count, BigInteger, nullable=False) for count in DAILY_SUMS),
)

# Differences found in rows before the checkpoint. Only a check from the beginning can clear them.
checkpoint_differences = Table(
    "checkpoint_differences",
    metadata,
    Column("checkpoint_id", BigInteger, ForeignKey("checkpoints.id"), primary_key=True, autoincrement=False),
    Column("kind", Text, primary_key=True),
    Column("subject", Text, primary_key=True),
    Column("message", Text, nullable=False),
)

# Once `exported_at` is set, the charges up to journal entry `entry`, and usage rows without an entry up to `number`,
# may be removed. Triggers read this table.
archives = Table(
    "archives",
    metadata,
    Column("checkpoint_id", BigInteger, ForeignKey("checkpoints.id"), primary_key=True, autoincrement=False),
    Column("before", Text, nullable=False, unique=True),  # the first month that is not archived, YYYY-MM
    Column("entry", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("checksum", Text),  # SHA-256 of the manifest
    Column("exported_at", Double),
    Column("removed_at", Double),
)

# Backends that get an identifier's requests: the row with the highest version applies. If its weights are empty,
# those in `config.yaml` apply, or the identifier was removed.
served_traffic = Table(  # append-only
    "served_traffic",
    metadata,
    Column("version", Number, primary_key=True, autoincrement=False),
    Column("identifier", Text, nullable=False),
    Column("weights", Text, nullable=False),  # a JSON object of backend to weight
    Column("before", BigInteger),  # version of the row that a rollback restores
    Column("undoes", BigInteger),  # for a rollback: version of the row that it undid
    Column("changed_at", Double, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Index("ix_served_traffic_identifier_version", "identifier", "version"),
)

served_prices = Table(  # append-only
    "served_prices",
    metadata,
    Column("version", Number, primary_key=True, autoincrement=False),
    Column("identifier", Text, nullable=False),
    Column("effective_at", Double, nullable=False),
    Column("input", BigInteger, nullable=False),  # nano-units per token; likewise the next two
    Column("cached_input", BigInteger, nullable=False),
    Column("output", BigInteger, nullable=False),
)

served_models = Table(
    "served_models",
    metadata,
    Column("identifier", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("since", BigInteger, nullable=False),  # version at its last creation or removal; hides earlier prices
    Column("spec", Text, nullable=False),  # a ModelSpec as a JSON object
    Column("created_at", Double, nullable=False),
    Column("removed_at", Double),
)

served_backends = Table(
    "served_backends",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("args", Text, nullable=False),  # a JSON object, as is `options`; neither ever changes
    Column("options", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("retired_at", Double),
)

# Tables defined in a separate file. `metadata` is complete only with them.
import serve_app.accounting.console_tables  # noqa: E402, F401
