"""`serve-app keys secret`: whether the key secret before can be removed, and what it would cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.keys import app

MAX_KEYS_LISTED = 500


@command(app, "secret", examples=("serve-app keys secret", "serve-app keys secret --limit 500 --json"))
def show_secret(
    session: Session,
    limit: Annotated[int, typer.Option(min=1, max=MAX_KEYS_LISTED, help="List at most so many keys.")] = 100,
) -> None:
    """Show which keys the present key secret opens, and list those that still need the one before.

    A key is moved to the present secret when it is used at a gateway that knows both.
    """
    found = session.client.api_get("key-secret", query={"limit": limit})
    rows = [
        ("secret", found["mark"]),
        ("secret before", found["previous_mark"] or "none is set"),
        ("keys moved", found["moved"]),
        ("keys not moved", found["unmoved"]),
        ("sealed secrets not moved", found["unsealed"]),
    ]
    session.out.record(found, rows, note=advice(found))
    if session.out.as_json or not found["data"]:
        return
    columns = ("id", "kind", "name", "hint", "account", "account name", "secret", "last used", "created")
    names = ("id", "kind", "name", "hint", "account_id", "account_name", "mark", "last_day", "created_at")
    more = found["unmoved"] - len(found["data"])
    session.out.table(
        found,
        columns,
        [tuple(key[name] for name in names) for key in found["data"]],
        empty="",
        footer=f"and {more:,} more" if more else "",
    )


def advice(found: dict[str, Any]) -> str:
    """What removing the secret before would do."""
    if found["previous_mark"] is None:
        if not found["unmoved"] and not found["unsealed"]:
            return "Only one secret is set, and it opens everything."
        return (
            "Only one secret is set. Keys without a mark are of an earlier release and under it, unless it was "
            "replaced since; others that it does not open get 401."
        )
    if not found["unmoved"] and not found["unsealed"]:
        return "Nothing needs the secret before: remove it once every gateway and console has the present one."
    lost = []
    if found["unmoved"]:
        lost.append("the keys below stop working (401) unless they are used before")
    if found["unsealed"]:
        lost.append("one-time codes and webhooks that are not sealed anew fail; a running console does that")
    return f"If you remove the secret before now, {', and '.join(lost)}."
