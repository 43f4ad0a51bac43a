"""The schema of release 0.1."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

APPEND_ONLY = ("price_versions", "audit_log", "served_traffic", "served_prices")
USAGE_COLUMNS = (
    "request_id, account_id, key_id, model, backend, price_version, day, prompt_tokens, cached_tokens, "
    "completion_tokens, charged, uncollected, outcome, started_at, finished_at, settled_at, entry_id"
)
ARCHIVED = "(SELECT coalesce(max({0}), 0) FROM archives WHERE exported_at IS NOT NULL)"
ARCHIVED_ENTRY, ARCHIVED_NUMBER = ARCHIVED.format("entry"), ARCHIVED.format("number")
#: By table: the condition that a row is in no archive. It must not be NULL, even where a column is NULL.
NOT_ARCHIVED = {
    "journal_entries": f"OLD.kind <> 'charge' OR OLD.id > {ARCHIVED_ENTRY}",
    "postings": f"OLD.entry_id > {ARCHIVED_ENTRY}",
    "usage": f"CASE WHEN OLD.entry_id IS NULL THEN OLD.number IS NULL OR OLD.number > {ARCHIVED_NUMBER} "
    f"ELSE OLD.entry_id > {ARCHIVED_ENTRY} END",
}


def upgrade() -> None:
    _tables()
    op.execute("INSERT INTO ledger_head (id, version, entry) VALUES (1, 0, 0)")
    if op.get_bind().dialect.name == "sqlite":
        _sqlite_triggers()
    else:
        _postgresql_triggers()


def _sqlite_triggers() -> None:
    refuse = "BEGIN SELECT RAISE(ABORT, '{0} is append-only'); END"
    for table in (*APPEND_ONLY, "journal_entries", "postings"):
        op.execute(f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse.format(table)}")
    for table in APPEND_ONLY:
        op.execute(f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {refuse.format(table)}")
    for table, kept in NOT_ARCHIVED.items():
        op.execute(f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} WHEN {kept} {refuse.format(table)}")
    # A number is never used twice, even after an archive has removed the row with the highest number.
    op.execute(
        "CREATE TRIGGER usage_number AFTER INSERT ON usage WHEN NEW.entry_id IS NULL AND NEW.number IS NULL BEGIN "
        "UPDATE usage SET number = 1 + max((SELECT coalesce(max(number), 0) FROM usage), "
        "(SELECT coalesce(max(number), 0) FROM archives)) WHERE request_id = NEW.request_id; END"
    )
    op.execute(f"CREATE TRIGGER usage_no_update BEFORE UPDATE OF {USAGE_COLUMNS} ON usage {refuse.format('usage')}")
    op.execute(
        "CREATE TRIGGER usage_no_renumber BEFORE UPDATE OF number ON usage "
        f"WHEN OLD.number IS NOT NULL OR OLD.entry_id IS NOT NULL {refuse.format('usage')}"
    )


def _postgresql_triggers() -> None:
    op.execute(
        "CREATE FUNCTION ledger_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION ledger_append_only()"
        )
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
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE{columns} OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION ledger_append_only()"
        )
        # A trigger's condition cannot query another table, so its function checks the condition.
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


def _tables() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("granted", sa.BigInteger(), nullable=False),
        sa.Column("topped_up", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False, index=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("rpm", sa.BigInteger()),
        sa.Column("tpm", sa.BigInteger()),
        sa.Column("concurrency", sa.BigInteger()),
        sa.Column("weight", sa.BigInteger()),
        sa.Column("idempotency_key", sa.Text(), unique=True),
        sa.CheckConstraint("granted >= 0", name="granted_not_negative"),
        sa.CheckConstraint("topped_up >= 0", name="topped_up_not_negative"),
    )
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, primary_key=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text()),
        sa.Column("address", sa.Text()),
    )
    op.create_index("ix_audit_log_account_id_id", "audit_log", ["account_id", "id"])
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("closing", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("usage_rows", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("proven_at", sa.Double()),
        sa.CheckConstraint("kind IN ('last', 'full', 'closing', 'old')", name="kind"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "ledger_head",
        sa.Column("id", sa.Integer(), autoincrement=False, primary_key=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("audit", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("currency", sa.Text()),
        sa.Column("runs_from", sa.Text(), server_default=sa.text("'0001'"), nullable=False),
        sa.CheckConstraint("id = 1", name="one_row"),
    )
    op.create_table(
        "limiter_holds",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False, index=True),
        sa.Column("terms", sa.Text(), nullable=False),
        sa.Column("posted_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "limiter_leases",
        sa.Column("shards", sa.Integer(), autoincrement=False, primary_key=True),
        sa.Column("shard", sa.Integer(), autoincrement=False, primary_key=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("renewals", sa.BigInteger(), nullable=False),
        sa.Column("lasts_s", sa.Double(), nullable=False),
        sa.Column("released", sa.Boolean(), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
    )
    op.create_table(
        "price_versions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("cached_input", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.UniqueConstraint("model", "input", "cached_input", "output"),
    )
    op.create_table(
        "served_backends",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("args", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("retired_at", sa.Double()),
    )
    op.create_table(
        "served_models",
        sa.Column("identifier", sa.Text(), primary_key=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double()),
    )
    op.create_table(
        "served_prices",
        sa.Column(
            "version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, primary_key=True
        ),
        sa.Column("identifier", sa.Text(), nullable=False),
        sa.Column("effective_at", sa.Double(), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("cached_input", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "served_traffic",
        sa.Column(
            "version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, primary_key=True
        ),
        sa.Column("identifier", sa.Text(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("before", sa.BigInteger()),
        sa.Column("undoes", sa.BigInteger()),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )
    op.create_index("ix_served_traffic_identifier_version", "served_traffic", ["identifier", "version"])
    op.create_table(
        "stuck_settlements",
        sa.Column("stuck_id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("settlement", sa.Text(), nullable=False),
        sa.Column("refusal", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("email", sa.Text(), nullable=False, unique=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("password", sa.Text(), nullable=False),
        sa.Column("totp_secret", sa.Text()),
        sa.Column("totp_step", sa.BigInteger(), nullable=False),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "alerts",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False, index=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("threshold", sa.BigInteger(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False, index=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False, unique=True),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False, index=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("models", sa.Text()),
        sa.Column("rpm", sa.BigInteger()),
        sa.Column("tpm", sa.BigInteger()),
        sa.Column("concurrency", sa.BigInteger()),
        sa.Column("budget", sa.BigInteger()),
        sa.Column("budget_period", sa.Text()),
        sa.Column("expires_at", sa.Double()),
        sa.Column("tags", sa.Text()),
        sa.Column("addresses", sa.Text()),
    )
    op.create_table(
        "archives",
        sa.Column(
            "checkpoint_id", sa.BigInteger(), sa.ForeignKey("checkpoints.id"), autoincrement=False, primary_key=True
        ),
        sa.Column("before", sa.Text(), nullable=False, unique=True),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.Text()),
        sa.Column("exported_at", sa.Double()),
        sa.Column("removed_at", sa.Double()),
    )
    op.create_table(
        "checkpoint_balances",
        sa.Column(
            "checkpoint_id", sa.BigInteger(), sa.ForeignKey("checkpoints.id"), autoincrement=False, primary_key=True
        ),
        sa.Column("ledger_account", sa.Text(), primary_key=True),
        sa.Column("amount", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "checkpoint_daily",
        sa.Column(
            "checkpoint_id", sa.BigInteger(), sa.ForeignKey("checkpoints.id"), autoincrement=False, primary_key=True
        ),
        sa.Column("account_id", sa.Text(), primary_key=True),
        sa.Column("day", sa.Text(), primary_key=True),
        sa.Column("key_id", sa.Text(), primary_key=True),
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.Column("uncollected", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "checkpoint_differences",
        sa.Column(
            "checkpoint_id", sa.BigInteger(), sa.ForeignKey("checkpoints.id"), autoincrement=False, primary_key=True
        ),
        sa.Column("kind", sa.Text(), primary_key=True),
        sa.Column("subject", sa.Text(), primary_key=True),
        sa.Column("message", sa.Text(), nullable=False),
    )
    op.create_table(
        "identities",
        sa.Column("issuer", sa.Text(), primary_key=True),
        sa.Column("subject", sa.Text(), primary_key=True),
        sa.Column("user_id", sa.Text(), sa.ForeignKey("users.id"), nullable=False, index=True),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "invitations",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("digest", sa.Text(), nullable=False, unique=True),
        sa.Column("email", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
    )
    op.create_index("ix_invitations_account_id", "invitations", ["account_id"])
    op.create_table(
        "journal_entries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.CheckConstraint("kind IN ('top_up', 'grant', 'charge', 'correction', 'expiry')", name="kind"),
        sa.UniqueConstraint("account_id", "idempotency_key"),
    )
    op.create_index("ix_journal_entries_account_id_id", "journal_entries", ["account_id", "id"])
    _partial_index("ix_journal_entries_movements", "journal_entries", ["account_id", "created_at"], "kind <> 'charge'")
    op.create_table(
        "management_keys",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False, index=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False, unique=True),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
    )
    op.create_table(
        "memberships",
        sa.Column("user_id", sa.Text(), sa.ForeignKey("users.id"), primary_key=True),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), primary_key=True),
        sa.Column("role", sa.Text(), nullable=False),
        sa.CheckConstraint("role IN ('owner', 'member', 'billing')", name="role"),
    )
    op.create_index("ix_memberships_account_id", "memberships", ["account_id"])
    op.create_table(
        "notices",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("threshold", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Double()),
        sa.Column("delivered_at", sa.Double()),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), server_default=sa.text("('')"), nullable=False),
    )
    op.create_index("ix_notices_account_id_created_at", "notices", ["account_id", "created_at"])
    _partial_index("ix_notices_due", "notices", ["next_at"], "next_at IS NOT NULL")
    op.create_table(
        "operator_roles",
        sa.Column("user_id", sa.Text(), sa.ForeignKey("users.id"), primary_key=True),
        sa.Column("role", sa.Text(), nullable=False),
        sa.CheckConstraint("role IN ('admin', 'support', 'finance', 'read-only')", name="role"),
    )
    op.create_table(
        "pending_credits",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("decided_by", sa.Text()),
        sa.Column("decided_at", sa.Double()),
        sa.Column("approved", sa.Boolean()),
    )
    op.create_table(
        "recharge_attempts",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False),
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
        sa.CheckConstraint("state IN ('open', 'succeeded', 'failed')", name="state"),
        sa.CheckConstraint("amount > 0", name="amount_positive"),
    )
    op.create_index(
        "ix_recharge_attempts_account_id_period_created_at", "recharge_attempts", ["account_id", "period", "created_at"]
    )
    _partial_index("ix_recharge_attempts_due", "recharge_attempts", ["next_at"], "state = 'open'")
    _partial_index("ix_recharge_attempts_open", "recharge_attempts", ["account_id"], "state = 'open'", unique=True)
    op.create_table(
        "recharges",
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), primary_key=True),
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
        sa.CheckConstraint("state IN ('off', 'on', 'paused')", name="state"),
        sa.CheckConstraint("0 < amount AND amount <= monthly_cap", name="amount_within_cap"),
        sa.CheckConstraint("threshold >= 0", name="threshold_not_negative"),
    )
    _partial_index("ix_recharges_on", "recharges", ["account_id"], "state = 'on'")
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("digest", sa.Text(), nullable=False, unique=True),
        sa.Column("user_id", sa.Text(), sa.ForeignKey("users.id"), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double()),
    )
    op.create_index("ix_sessions_user_id", "sessions", ["user_id"])
    op.create_table(
        "grants",
        sa.Column(
            "entry_id", sa.BigInteger(), sa.ForeignKey("journal_entries.id"), autoincrement=False, primary_key=True
        ),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False, index=True),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("remaining", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.CheckConstraint("0 <= remaining AND remaining <= amount", name="remaining_within_amount"),
    )
    _partial_index("ix_grants_due", "grants", ["expires_at", "entry_id"], "remaining > 0 AND expires_at IS NOT NULL")
    _partial_index("ix_grants_left", "grants", ["account_id"], "remaining > 0")
    op.create_table(
        "key_spend",
        sa.Column("key_id", sa.Text(), sa.ForeignKey("api_keys.id"), primary_key=True),
        sa.Column("period", sa.Text(), primary_key=True),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("charged >= 0", name="charged_not_negative"),
    )
    op.create_table(
        "postings",
        sa.Column(
            "entry_id", sa.BigInteger(), sa.ForeignKey("journal_entries.id"), autoincrement=False, primary_key=True
        ),
        sa.Column("line", sa.Integer(), autoincrement=False, primary_key=True),
        sa.Column("ledger_account", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "usage",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("key_id", sa.Text(), sa.ForeignKey("api_keys.id"), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("price_version", sa.BigInteger(), sa.ForeignKey("price_versions.id"), nullable=False),
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
        sa.Column("entry_id", sa.BigInteger(), sa.ForeignKey("journal_entries.id"), unique=True),
        sa.Column("number", sa.BigInteger()),
        sa.CheckConstraint("0 <= cached_tokens AND cached_tokens <= prompt_tokens", name="cached_within_prompt"),
        sa.CheckConstraint("charged >= 0", name="charged_not_negative"),
        sa.CheckConstraint("completion_tokens >= 0", name="completion_not_negative"),
        sa.CheckConstraint("uncollected >= 0", name="uncollected_not_negative"),
    )
    op.create_index("ix_usage_account_id_finished_at_request_id", "usage", ["account_id", "finished_at", "request_id"])
    _partial_index("ix_usage_number", "usage", ["number"], "number IS NOT NULL", unique=True)
    op.create_table(
        "usage_daily",
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), primary_key=True),
        sa.Column("day", sa.Text(), primary_key=True, index=True),
        sa.Column("key_id", sa.Text(), sa.ForeignKey("api_keys.id"), primary_key=True),
        sa.Column("model", sa.Text(), primary_key=True),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.Column("uncollected", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "replies",
        sa.Column("account_id", sa.Text(), sa.ForeignKey("accounts.id"), primary_key=True),
        sa.Column("idempotency_key", sa.Text(), primary_key=True),
        sa.Column("request_id", sa.Text(), sa.ForeignKey("usage.request_id"), nullable=False, index=True),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False, index=True),
    )


def _partial_index(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    rows = sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=rows, postgresql_where=rows)
