"""Statements that differ between SQLite and PostgreSQL. `database` handles the differences in connections.

Only this module, `database` and the backups depend on the kind of database. The backups use SQLite's backup API and
`pg_dump`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import JSON, BigInteger, ColumnElement, Connection, Select, Table, cast, delete, func, text
from sqlalchemy.dialects import postgresql, sqlite

_INSERT: Mapping[str, Callable[[Table], Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
# A long job's rows per transaction. Fewer on SQLite, where all other writers wait for the transaction.
_ROWS_AT_ONCE = {"sqlite": 2000, "postgresql": 10_000}
_ROW_ID = {"sqlite": "rowid", "postgresql": "ctid"}


class Upsert:
    """Inserts rows. If a row with the same primary key exists, applies `changes` to that row instead.

    `changes` and `where` are functions of the columns of the row to insert. The statements are built once: SQLAlchemy
    takes longer to build one than SQLite takes to run it.
    """

    def __init__(
        self, table: Table, changes: Callable[[Any], dict[str, Any]], where: Callable[[Any], Any] | None = None
    ) -> None:
        self._statements = {}
        for name, insert in _INSERT.items():
            added = insert(table)
            self._statements[name] = added.on_conflict_do_update(
                index_elements=list(table.primary_key.columns),
                set_=changes(added.excluded),
                where=where and where(added.excluded),
            )

    def run(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        connection.execute(self._statements[connection.dialect.name], rows)


def insert_if_new(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    """Inserts a row unless a row with the same primary key exists."""
    connection.execute(_INSERT[connection.dialect.name](table).values(row).on_conflict_do_nothing())


def add_up(connection: Connection, table: Table, sums: Iterable[str], rows: Select[Any]) -> None:
    """Inserts the rows of a query. If a row with the same primary key exists, adds the columns `sums` to it instead."""
    insert = _INSERT[connection.dialect.name](table)
    # Without a WHERE, SQLite parses ON CONFLICT as a join.
    added = insert.from_select([column.name for column in table.columns], rows.where(text("true")))
    connection.execute(
        added.on_conflict_do_update(
            index_elements=list(table.primary_key.columns),
            set_={name: table.c[name] + added.excluded[name] for name in sums},
        )
    )


def delete_some(connection: Connection, table: Table, **where: Any) -> int:
    """Deletes up to `2 * rows_at_once` rows whose columns have these values. Returns the number of deleted rows."""
    row, limit = _ROW_ID[connection.dialect.name], 2 * rows_at_once(connection)
    conditions = " AND ".join(f"{name} = :{name}" for name in where)
    some = f"SELECT {row} FROM {table.name} WHERE {conditions} LIMIT {limit}"
    return connection.execute(delete(table).where(text(f"{row} IN ({some})")), where).rowcount


def rows_at_once(connection: Connection) -> int:
    """Returns the number of rows that a long job reads or changes in one transaction."""
    return _ROWS_AT_ONCE[connection.dialect.name]


def whole(connection: Connection, value: ColumnElement[Any]) -> ColumnElement[int]:
    """Returns the floor of a positive number. PostgreSQL's cast rounds, SQLite's truncates. SQLite has no `floor`."""
    return cast(value if connection.dialect.name == "sqlite" else func.floor(value), BigInteger)


def texts_in(connection: Connection, array: ColumnElement[Any]) -> Any:
    """Returns the texts of a JSON array, as a table with the column `value`."""
    if connection.dialect.name == "sqlite":
        return func.json_each(array).table_valued("value")
    return func.json_array_elements_text(cast(array, JSON)).table_valued("value")
