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
#: By table: the rows that no archive holds. Where a column is null, the comparison must not be.
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
    # A number is never used twice, even after an archive has removed the row with the highest one.
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
        # A trigger's condition cannot query another table.
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
        sa.Column("weight", sa.BigInteger()),
        sa.Column("idempotency_key", sa.Text()),
        sa.CheckConstraint("granted >= 0", name=op.f("ck_accounts_granted_not_negative")),
        sa.CheckConstraint("topped_up >= 0", name=op.f("ck_accounts_topped_up_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_accounts_idempotency_key")),
    )
    op.create_index(op.f("ix_accounts_version"), "accounts", ["version"])
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text()),
        sa.Column("address", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_account_id_id", "audit_log", ["account_id", "id"])
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("closing", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("usage_rows", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("proven_at", sa.Double()),
        sa.CheckConstraint("kind IN ('last', 'full', 'closing', 'old')", name=op.f("ck_checkpoints_kind")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "ledger_head",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("audit", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("currency", sa.Text()),
        sa.Column("runs_from", sa.Text(), server_default=sa.text("'0001'"), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_ledger_head_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_head")),
    )
    op.create_table(
        "limiter_holds",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("terms", sa.Text(), nullable=False),
        sa.Column("posted_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_limiter_holds")),
    )
    op.create_index(op.f("ix_limiter_holds_owner"), "limiter_holds", ["owner"])
    op.create_table(
        "limiter_leases",
        sa.Column("shards", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("shard", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("renewals", sa.BigInteger(), nullable=False),
        sa.Column("lasts_s", sa.Double(), nullable=False),
        sa.Column("released", sa.Boolean(), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("shards", "shard", name=op.f("pk_limiter_leases")),
    )
    op.create_table(
        "price_versions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("cached_input", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_price_versions")),
        sa.UniqueConstraint(
            "model", "input", "cached_input", "output", name=op.f("uq_price_versions_model_input_cached_input_output")
        ),
    )
    op.create_table(
        "served_backends",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("args", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("retired_at", sa.Double()),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_served_backends")),
    )
    op.create_table(
        "served_models",
        sa.Column("identifier", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double()),
        sa.PrimaryKeyConstraint("identifier", name=op.f("pk_served_models")),
    )
    op.create_table(
        "served_prices",
        sa.Column("version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("identifier", sa.Text(), nullable=False),
        sa.Column("effective_at", sa.Double(), nullable=False),
        sa.Column("input", sa.BigInteger(), nullable=False),
        sa.Column("cached_input", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_served_prices")),
    )
    op.create_table(
        "served_traffic",
        sa.Column("version", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("identifier", sa.Text(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("before", sa.BigInteger()),
        sa.Column("undoes", sa.BigInteger()),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_served_traffic")),
    )
    op.create_index("ix_served_traffic_identifier_version", "served_traffic", ["identifier", "version"])
    op.create_table(
        "stuck_settlements",
        sa.Column("stuck_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("settlement", sa.Text(), nullable=False),
        sa.Column("refusal", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("stuck_id", name=op.f("pk_stuck_settlements")),
    )
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
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
    )
    op.create_table(
        "alerts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("threshold", sa.BigInteger(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_alerts_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
    )
    op.create_index(op.f("ix_alerts_account_id"), "alerts", ["account_id"])
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
        sa.Column("models", sa.Text()),
        sa.Column("rpm", sa.BigInteger()),
        sa.Column("tpm", sa.BigInteger()),
        sa.Column("concurrency", sa.BigInteger()),
        sa.Column("budget", sa.BigInteger()),
        sa.Column("budget_period", sa.Text()),
        sa.Column("expires_at", sa.Double()),
        sa.Column("tags", sa.Text()),
        sa.Column("addresses", sa.Text()),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_api_keys_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_index(op.f("ix_api_keys_account_id"), "api_keys", ["account_id"])
    op.create_index(op.f("ix_api_keys_version"), "api_keys", ["version"])
    op.create_table(
        "archives",
        sa.Column("checkpoint_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("before", sa.Text(), nullable=False),
        sa.Column("entry", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("checksum", sa.Text()),
        sa.Column("exported_at", sa.Double()),
        sa.Column("removed_at", sa.Double()),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_archives_checkpoint_id")),
        sa.PrimaryKeyConstraint("checkpoint_id", name=op.f("pk_archives")),
        sa.UniqueConstraint("before", name=op.f("uq_archives_before")),
    )
    op.create_table(
        "checkpoint_balances",
        sa.Column("checkpoint_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("ledger_account", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_checkpoint_balances_checkpoint_id")
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "ledger_account", name=op.f("pk_checkpoint_balances")),
    )
    op.create_table(
        "checkpoint_daily",
        sa.Column("checkpoint_id", sa.BigInteger(), autoincrement=False, nullable=False),
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
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_checkpoint_daily_checkpoint_id")),
        sa.PrimaryKeyConstraint(
            "checkpoint_id", "account_id", "day", "key_id", "model", name=op.f("pk_checkpoint_daily")
        ),
    )
    op.create_table(
        "checkpoint_differences",
        sa.Column("checkpoint_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_checkpoint_differences_checkpoint_id")
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "kind", "subject", name=op.f("pk_checkpoint_differences")),
    )
    op.create_table(
        "identities",
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_identities_user_id")),
        sa.PrimaryKeyConstraint("issuer", "subject", name=op.f("pk_identities")),
    )
    op.create_index(op.f("ix_identities_user_id"), "identities", ["user_id"])
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
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_invitations_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invitations")),
        sa.UniqueConstraint("digest", name=op.f("uq_invitations_digest")),
    )
    op.create_index("ix_invitations_account_id", "invitations", ["account_id"])
    op.create_table(
        "journal_entries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.CheckConstraint(
            "kind IN ('top_up', 'grant', 'charge', 'correction', 'expiry')", name=op.f("ck_journal_entries_kind")
        ),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_journal_entries_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_journal_entries")),
        sa.UniqueConstraint(
            "account_id", "idempotency_key", name=op.f("uq_journal_entries_account_id_idempotency_key")
        ),
    )
    op.create_index("ix_journal_entries_account_id_id", "journal_entries", ["account_id", "id"])
    op.create_index(
        "ix_journal_entries_movements",
        "journal_entries",
        ["account_id", "created_at"],
        sqlite_where=sa.text("kind <> 'charge'"),
        postgresql_where=sa.text("kind <> 'charge'"),
    )
    op.create_table(
        "management_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_management_keys_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_management_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_management_keys_digest")),
    )
    op.create_index(op.f("ix_management_keys_account_id"), "management_keys", ["account_id"])
    op.create_table(
        "memberships",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.CheckConstraint("role IN ('owner', 'member', 'billing')", name=op.f("ck_memberships_role")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_memberships_account_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_memberships_user_id")),
        sa.PrimaryKeyConstraint("user_id", "account_id", name=op.f("pk_memberships")),
    )
    op.create_index("ix_memberships_account_id", "memberships", ["account_id"])
    op.create_table(
        "notices",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
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
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_notices_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
    )
    op.create_index("ix_notices_account_id_created_at", "notices", ["account_id", "created_at"])
    op.create_index(
        "ix_notices_due",
        "notices",
        ["next_at"],
        sqlite_where=sa.text("next_at IS NOT NULL"),
        postgresql_where=sa.text("next_at IS NOT NULL"),
    )
    op.create_table(
        "operator_roles",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.CheckConstraint("role IN ('admin', 'support', 'finance', 'read-only')", name=op.f("ck_operator_roles_role")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_operator_roles_user_id")),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_operator_roles")),
    )
    op.create_table(
        "pending_credits",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("decided_by", sa.Text()),
        sa.Column("decided_at", sa.Double()),
        sa.Column("approved", sa.Boolean()),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_pending_credits_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pending_credits")),
    )
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
        sa.CheckConstraint("state IN ('open', 'succeeded', 'failed')", name=op.f("ck_recharge_attempts_state")),
        sa.CheckConstraint("amount > 0", name=op.f("ck_recharge_attempts_amount_positive")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_recharge_attempts_account_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_recharge_attempts")),
    )
    op.create_index(
        "ix_recharge_attempts_account_id_period_created_at", "recharge_attempts", ["account_id", "period", "created_at"]
    )
    op.create_index(
        "ix_recharge_attempts_due",
        "recharge_attempts",
        ["next_at"],
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_index(
        "ix_recharge_attempts_open",
        "recharge_attempts",
        ["account_id"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
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
        sa.CheckConstraint("state IN ('off', 'on', 'paused')", name=op.f("ck_recharges_state")),
        sa.CheckConstraint("0 < amount AND amount <= monthly_cap", name=op.f("ck_recharges_amount_within_cap")),
        sa.CheckConstraint("threshold >= 0", name=op.f("ck_recharges_threshold_not_negative")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_recharges_account_id")),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_recharges")),
    )
    op.create_index(
        "ix_recharges_on",
        "recharges",
        ["account_id"],
        sqlite_where=sa.text("state = 'on'"),
        postgresql_where=sa.text("state = 'on'"),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double()),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_sessions_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("digest", name=op.f("uq_sessions_digest")),
    )
    op.create_index("ix_sessions_user_id", "sessions", ["user_id"])
    op.create_table(
        "grants",
        sa.Column("entry_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("remaining", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.CheckConstraint("0 <= remaining AND remaining <= amount", name=op.f("ck_grants_remaining_within_amount")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_grants_account_id")),
        sa.ForeignKeyConstraint(["entry_id"], ["journal_entries.id"], name=op.f("fk_grants_entry_id")),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_grants")),
    )
    op.create_index(op.f("ix_grants_account_id"), "grants", ["account_id"])
    op.create_index(
        "ix_grants_due",
        "grants",
        ["expires_at", "entry_id"],
        sqlite_where=sa.text("remaining > 0 AND expires_at IS NOT NULL"),
        postgresql_where=sa.text("remaining > 0 AND expires_at IS NOT NULL"),
    )
    op.create_index(
        "ix_grants_left",
        "grants",
        ["account_id"],
        sqlite_where=sa.text("remaining > 0"),
        postgresql_where=sa.text("remaining > 0"),
    )
    op.create_table(
        "key_spend",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("charged", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("charged >= 0", name=op.f("ck_key_spend_charged_not_negative")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_key_spend_key_id")),
        sa.PrimaryKeyConstraint("key_id", "period", name=op.f("pk_key_spend")),
    )
    op.create_table(
        "postings",
        sa.Column("entry_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("line", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ledger_account", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["entry_id"], ["journal_entries.id"], name=op.f("fk_postings_entry_id")),
        sa.PrimaryKeyConstraint("entry_id", "line", name=op.f("pk_postings")),
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
        sa.Column("number", sa.BigInteger()),
        sa.CheckConstraint(
            "0 <= cached_tokens AND cached_tokens <= prompt_tokens", name=op.f("ck_usage_cached_within_prompt")
        ),
        sa.CheckConstraint("charged >= 0", name=op.f("ck_usage_charged_not_negative")),
        sa.CheckConstraint("completion_tokens >= 0", name=op.f("ck_usage_completion_not_negative")),
        sa.CheckConstraint("uncollected >= 0", name=op.f("ck_usage_uncollected_not_negative")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_usage_account_id")),
        sa.ForeignKeyConstraint(["entry_id"], ["journal_entries.id"], name=op.f("fk_usage_entry_id")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_usage_key_id")),
        sa.ForeignKeyConstraint(["price_version"], ["price_versions.id"], name=op.f("fk_usage_price_version")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_usage")),
        sa.UniqueConstraint("entry_id", name=op.f("uq_usage_entry_id")),
    )
    op.create_index("ix_usage_account_id_finished_at_request_id", "usage", ["account_id", "finished_at", "request_id"])
    op.create_index(
        "ix_usage_number",
        "usage",
        ["number"],
        unique=True,
        sqlite_where=sa.text("number IS NOT NULL"),
        postgresql_where=sa.text("number IS NOT NULL"),
    )
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
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_usage_daily_account_id")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=op.f("fk_usage_daily_key_id")),
        sa.PrimaryKeyConstraint("account_id", "day", "key_id", "model", name=op.f("pk_usage_daily")),
    )
    op.create_index(op.f("ix_usage_daily_day"), "usage_daily", ["day"])
    op.create_table(
        "replies",
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_replies_account_id")),
        sa.ForeignKeyConstraint(["request_id"], ["usage.request_id"], name=op.f("fk_replies_request_id")),
        sa.PrimaryKeyConstraint("account_id", "idempotency_key", name=op.f("pk_replies")),
    )
    op.create_index(op.f("ix_replies_created_at"), "replies", ["created_at"])
    op.create_index(op.f("ix_replies_request_id"), "replies", ["request_id"])
