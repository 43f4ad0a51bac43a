"""The table of malformed bodies that the parser, the gateway and the whole service are held to."""

from __future__ import annotations

from tests.malformed import documents, schemas, types, values
from tests.malformed.row import Row

TABLE: tuple[Row, ...] = (*documents.rows(), *types.rows(), *values.rows(), *schemas.rows())

assert len({row.name for row in TABLE}) == len(TABLE), "each row has a name of its own"
