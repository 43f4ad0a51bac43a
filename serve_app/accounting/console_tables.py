"""Console tables: people, alerts and their notices, credits, notes, announcements, management keys, and recharging."""

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
    Table,
    Text,
    text,
)

from serve_app.accounting.schema import metadata

users = Table(
    "users",
    metadata,
    Column("id", Text, primary_key=True),
    Column("email", Text, nullable=False, unique=True),  # in lower case
    Column("name", Text, nullable=False),
    Column("password", Text, nullable=False),  # argon2; empty: the person signs in with an identity
    Column("totp_secret", Text),
    Column("totp_step", BigInteger, nullable=False),  # step of the last accepted code
    Column("suspended", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
)

memberships = Table(
    "memberships",
    metadata,
    Column("user_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("role", Text, nullable=False),
    CheckConstraint("role IN ('owner', 'member', 'billing')", name="role"),
    Index("ix_memberships_account_id", "account_id"),
)

identities = Table(  # at an OpenID Connect provider
    "identities",
    metadata,
    Column("issuer", Text, primary_key=True),
    Column("subject", Text, primary_key=True),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False, index=True),
    Column("created_at", Double, nullable=False),
)

operator_roles = Table(
    "operator_roles",
    metadata,
    Column("user_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("role", Text, nullable=False),
    CheckConstraint("role IN ('admin', 'support', 'finance', 'read-only')", name="role"),
)

invitations = Table(
    "invitations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("digest", Text, nullable=False, unique=True),
    Column("email", Text, nullable=False),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("role", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("used_at", Double),
    Column("revoked_at", Double),
    Column("invited_by", Text),  # the inviting owner's name; null: the operator
    Index("ix_invitations_account_id", "account_id"),
)

sign_in_links = Table(  # for an account's administrator, who may not exist yet; a used link has no row
    "sign_in_links",
    metadata,
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("digest", Text, nullable=False, unique=True),
    Column("expires_at", Double, nullable=False),
)

recovery_codes = Table(  # a used code has no row
    "recovery_codes",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False, index=True),
)

passkeys = Table(
    "passkeys",
    metadata,
    Column("id", Text, primary_key=True),  # credential id; it and the public key are in base64url
    Column("user_id", Text, ForeignKey("users.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("public_key", Text, nullable=False),
    Column("sign_count", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("used_at", Double),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("digest", Text, nullable=False, unique=True),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("revoked_at", Double),
    Index("ix_sessions_user_id", "user_id"),
)

alerts = Table(
    "alerts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("threshold", BigInteger, nullable=False),
    Column("target", Text, nullable=False),
    Column("secret", Text, nullable=False),  # sealed, not hashed, because it signs messages to a webhook
    Column("state", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

notices = Table(
    "notices",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("kind", Text, nullable=False),  # copied from the alert; likewise `threshold`, `target` and `secret`
    Column("threshold", BigInteger, nullable=False),
    Column("value", BigInteger, nullable=False),
    Column("target", Text, nullable=False),
    Column("secret", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_at", Double),  # null: delivered, given up, or over the daily limit
    Column("delivered_at", Double),
    Column("error", Text, nullable=False),  # error of the last attempt
    Column("detail", Text, nullable=False, server_default=text("''")),  # reason why recharging is paused; else empty
    Index("ix_notices_account_id_created_at", "account_id", "created_at"),
)
Index(
    "ix_notices_due",
    notices.c.next_at,
    sqlite_where=text("next_at IS NOT NULL"),
    postgresql_where=text("next_at IS NOT NULL"),
)

pending_credits = Table(
    "pending_credits",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("memo", Text, nullable=False),
    Column("asked_by", Text, nullable=False),
    Column("asked_at", Double, nullable=False),
    Column("decided_by", Text),
    Column("decided_at", Double),  # null: pending
    Column("approved", Boolean),
)

account_notes = Table(
    "account_notes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("text", Text, nullable=False),
    Column("author", Text, nullable=False),  # an operator's e-mail address
    Column("created_at", Double, nullable=False),
    Index("ix_account_notes_account_id_created_at", "account_id", "created_at"),
)

announcements = Table(  # from operators to customers; few rows
    "announcements",
    metadata,
    Column("id", Text, primary_key=True),
    Column("text", Text, nullable=False),
    Column("level", Text, nullable=False),
    Column("account_id", Text, nullable=False),  # empty: every account
    Column("starts_at", Double, nullable=False),
    Column("ends_at", Double),  # null: until an operator ends it
    Column("author", Text, nullable=False),
)

management_keys = Table(
    "management_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("digest", Text, nullable=False, unique=True),
    Column("hint", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
)

# Details for an account's invoices; empty: not given.
billing_details = Table(
    "billing_details",
    metadata,
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("company", Text, nullable=False),
    Column("address", Text, nullable=False),  # lines, separated by newlines
    Column("tax_id", Text, nullable=False),
    Column("email", Text, nullable=False),
)

recharges = Table(
    "recharges",
    metadata,
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True),
    Column("threshold", BigInteger, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("monthly_cap", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),  # why recharging is paused
    Column("provider", Text, nullable=False),  # issuer of `customer` and `method`; empty before the first method
    Column("customer", Text),
    Column("method", Text),  # never null while recharging is on
    Column("setup_id", Text),  # set while a method is being saved
    Column("next_at", Double, nullable=False),  # earliest start of the next attempt
    CheckConstraint("state IN ('off', 'on', 'paused')", name="state"),
    CheckConstraint("threshold >= 0", name="threshold_not_negative"),
    CheckConstraint("0 < amount AND amount <= monthly_cap", name="amount_within_cap"),
)
Index(
    "ix_recharges_on",
    recharges.c.account_id,
    sqlite_where=text("state = 'on'"),
    postgresql_where=text("state = 'on'"),
)

recharge_attempts = Table(
    "recharge_attempts",
    metadata,
    Column("id", Text, primary_key=True),  # also the idempotency key of its payment
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("amount", BigInteger, nullable=False),  # as it was when the attempt began; likewise the next four
    Column("currency", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("customer", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("period", Text, nullable=False),  # YYYY-MM; the attempt counts towards this month's cap
    Column("state", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_at", Double),  # when an open attempt is checked again
    CheckConstraint("state IN ('open', 'succeeded', 'failed')", name="state"),
    CheckConstraint("amount > 0", name="amount_positive"),
    Index("ix_recharge_attempts_account_id_period_created_at", "account_id", "period", "created_at"),
)
Index(
    "ix_recharge_attempts_open",
    recharge_attempts.c.account_id,
    unique=True,
    sqlite_where=text("state = 'open'"),
    postgresql_where=text("state = 'open'"),
)
Index(
    "ix_recharge_attempts_due",
    recharge_attempts.c.next_at,
    sqlite_where=text("state = 'open'"),
    postgresql_where=text("state = 'open'"),
)
