"""Keys have a second digest while the secret under which they are hashed is replaced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    for table in ("api_keys", "management_keys"):
        for name in ("moved_digest", "digest_mark", "moved_mark"):
            op.add_column(table, sa.Column(name, sa.Text()))
        op.create_index(f"ix_{table}_moved_digest", table, ["moved_digest"], unique=True)
