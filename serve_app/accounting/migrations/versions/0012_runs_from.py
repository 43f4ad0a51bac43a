"""The schema says which release is the oldest that runs on it, so that two releases can share a ledger for a while.

A migration that only adds leaves the value alone. One that takes something away sets it to the revision of the first
release that works without it, and comes a release later than that.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    # Earlier releases don't read it: they start on no schema that they don't know.
    op.add_column("ledger_head", sa.Column("runs_from", sa.Text(), nullable=False, server_default=sa.text("'0012'")))
