"""`serve-app plan`: recorded usage, replayed on other replicas, limits, prices and policies."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command

app = typer.Typer()
Options = list[str] | None


def _many(metavar: str, help: str) -> Any:
    return Annotated[Options, typer.Option(metavar=metavar, help=help)]


@command(
    app,
    "plan",
    examples=(
        "serve-app plan --from usage --since 2026-11-01 --replicas 0:4 --replica-price 2.50",
        "serve-app plan --from nov.csv --policy rule --policy fixed:2 --policy fixed:3",
        "serve-app plan --from nov.csv --setting fill=0.8 --limit tpm=200000 --price 0.30/0.08/1.20",
        "serve-app plan --from nov.csv --device slots=128,prefill=30000,step_ms=15,row_ms=0.1 --start 60",
    ),
)
def plan(
    session: Session,
    source: Annotated[
        str, typer.Option("--from", metavar="usage|FILE", help="The service's own records, or an export of them.")
    ] = "usage",
    since: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="First day, UTC, of the records.")] = None,
    until: Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="Last day, UTC.")] = None,
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="Only requests of this backend.")] = None,
    replicas: Annotated[str, typer.Option(metavar="MIN:MAX", help="Bounds of the rule.")] = "1:4",
    policy: _many("rule|fixed:N", "What to compare, once for each. [default: rule]") = None,  # type: ignore[valid-type]
    setting: _many("NAME=VALUE", "Of the rule, as in policy_kwargs.") = None,  # type: ignore[valid-type]
    limit: _many("NAME=N", "Of every account: rpm, tpm, concurrency, weight.") = None,  # type: ignore[valid-type]
    price: Annotated[
        str | None, typer.Option(metavar="INPUT/CACHED/OUTPUT", help="Per million tokens, instead of those recorded.")
    ] = None,
    replica_price: Annotated[float, typer.Option(min=0, metavar="PRICE", help="Of one replica, an hour.")] = 0.0,
    device: Annotated[
        str, typer.Option(metavar="NAME=VALUE,…", help="slots, waiting, kv, prefill (tokens/s), step_ms, row_ms.")
    ] = "",
    start: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Until a new replica takes requests.")] = 90.0,
) -> None:
    """Replay recorded usage with other replicas, limits, prices or policies: waits, refusals, revenue, cost."""
    from serve_app.cli.plan_replay import replay  # loads what no other command needs

    replay(
        session,
        source=source,
        since=since,
        until=until,
        backend=backend,
        replicas=replicas,
        policy=policy,
        setting=setting,
        limit=limit,
        price=price,
        replica_price=replica_price,
        device=device,
        start=start,
    )
