"""Usage is exported by account and time: an index in that order, in place of the one by account and day."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.drop_index("ix_usage_account_id_day", "usage")
    op.create_index("ix_usage_account_id_finished_at_request_id", "usage", ["account_id", "finished_at", "request_id"])
