"""The table of malformed bodies: the parser is tested with `TABLE`, the layers above it with `SAMPLE`."""

from __future__ import annotations

from tests.malformed import documents, schemas, types, values
from tests.malformed.row import Row

TABLE: tuple[Row, ...] = (*documents.rows(), *types.rows(), *values.rows(), *schemas.rows())

_ROWS = {row.name: row for row in TABLE}
assert len(_ROWS) == len(TABLE), "two rows have the same name"

SAMPLE: tuple[Row, ...] = tuple(
    _ROWS[name]
    for name in (
        "nothing",
        "cut before the end",
        "a byte order mark",
        "a broken character",
        "a high surrogate alone",
        "NaN",
        "arrays without an end",
        "100,000 messages",
        "a byte over 4 MiB",
        "50 MB",
        "NUL as an escape",
        "unknown fields of any kind",
        "exactly 4 MiB",
        "messages[0].content: integer for string or array",
        "model: absent",
        "every field at once",
        "temperature: 2.01",
        "an unknown model",
        "20,000 messages",
        "a schema 65 levels deep",
        "a reference to nothing",
        "a bias for an id beyond the vocabulary",
        "4 MB of words",
    )
)
"""A row of each status, code and reason; the last three are refused by the model."""
