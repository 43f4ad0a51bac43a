"""Keys have tags and allowed addresses.

Only adds: the release before runs on this schema. Its limiters and gateways let such a key in from anywhere.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("tags", sa.Text()))
    op.add_column("api_keys", sa.Column("addresses", sa.Text()))
