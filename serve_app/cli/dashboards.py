"""`serve-app dashboards …`: put the shipped dashboards and alert rules into a Grafana, over its API or as files."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.connection import check_way
from serve_app.cli.grafana.address import parse_address, read_token
from serve_app.cli.grafana.api import Grafana
from serve_app.cli.grafana.files import provisioning, write_files
from serve_app.cli.grafana.plan import DEFAULT_SOURCE, Change, Wish, plan
from serve_app.cli.grafana.rules import intervals
from serve_app.cli.grafana.shipped import read_shipped
from serve_app.cli.output import CommandError, UsageError

app = typer.Typer(name="dashboards", help="Grafana dashboards and alert rules.")

SHOWN = 12  # differences of one dashboard or rule

Folder = Annotated[str, typer.Option(metavar="NAME", help="Folder in Grafana.")]
Source = Annotated[
    Path | None, typer.Option("--from", metavar="FOLDER", help="Other dashboards and rules than this version's.")
]


@command(
    app,
    "push",
    examples=(
        "serve-app dashboards push --grafana https://grafana.example.com --token-file token --dry-run",
        "serve-app dashboards push --grafana http://127.0.0.1:3000 --prometheus http://127.0.0.1:9090 --yes",
    ),
)
def push_dashboards(
    session: Session,
    grafana: Annotated[str, typer.Option(metavar="URL", help="Address of Grafana; may hold user:password@.")],
    *,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", envvar="GRAFANA_TOKEN", help="Service account token.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the token.")] = None,
    folder: Folder = "serve-app",
    datasource: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Prometheus data source; default: {DEFAULT_SOURCE!r}, else Grafana's default."
        ),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="URL", help="Make the data source, or change its address to this.")
    ] = None,
    alerts: Annotated[
        bool, typer.Option("--alerts/--no-alerts", help="Whether Grafana is to evaluate the alert rules.")
    ] = True,
    source: Source = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Apply without asking.")] = False,
) -> None:
    """Show what differs in Grafana from the shipped dashboards and rules, and apply it.

    A push removes what an earlier one made and is no longer shipped. It leaves alone what people made.
    """
    address = parse_address(grafana)
    if prometheus is not None:
        parse_address(prometheus, "--prometheus")
    credential = read_token(token, token_file) or address.login
    if credential is None:
        raise UsageError("Grafana wants --token, --token-file, GRAFANA_TOKEN, or user:password in the address")
    check_way(address.url, "Grafana's credential", session.connection.insecure)
    if not (yes or dry_run) and (session.out.as_json or not sys.stdin.isatty()):
        raise UsageError("nobody can be asked here: pass --yes to apply, or --dry-run to only look")
    shipped = read_shipped(source, alerts=alerts)
    api = Grafana(address, credential)
    groups = intervals(shipped.groups) if alerts else None
    found = api.look(folder, [board["uid"] for board in shipped.boards], groups)
    changes = plan(found, shipped, Wish(folder, datasource, prometheus, alerts))
    pending = [change for change in changes if change.action != "unchanged"]
    if not session.out.as_json:
        _print_plan(session, changes, address.url)
    apply = bool(pending) and not dry_run
    if apply and not yes and not typer.confirm("Apply?"):
        raise CommandError("nothing was applied", code="declined")
    if apply:
        _apply(api, pending, found.folder_uid)
    if session.out.as_json:
        session.out.json({"data": [_as_json(change, address.url) for change in changes], "applied": apply})
    elif apply:
        session.out.line(f"Applied {len(pending)} {'change' if len(pending) == 1 else 'changes'}.")


@command(app, "provision", examples=("serve-app dashboards provision --to /etc/serve-app-grafana",))
def provision_dashboards(
    session: Session,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write; made if there is none.")],
    *,
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Where Grafana reaches Prometheus.")
    ] = "http://127.0.0.1:9090",
    datasource: Annotated[str, typer.Option(metavar="NAME", help="Name of the data source.")] = DEFAULT_SOURCE,
    folder: Folder = "serve-app",
    seen_at: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where Grafana sees FOLDER, if elsewhere: in a container."),
    ] = None,
    source: Source = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that serve-app did not write.")] = False,
) -> None:
    """Write the files from which a Grafana provisions itself, and the rules for Prometheus."""
    parse_address(prometheus, "--prometheus")
    path = PurePosixPath(seen_at or to.absolute().as_posix())
    files = provisioning(
        read_shipped(source), folder=folder, datasource=datasource, prometheus=prometheus, seen_at=path
    )
    written = write_files(to, files, force=force)
    session.out.table(
        {"data": [{"path": str(to / file.path), "action": file.action} for file in written]},
        ("file", ""),
        [(to / file.path, file.action) for file in written],
        empty="Nothing to write.",
        footer=f"Start Grafana with GF_PATHS_PROVISIONING={path / 'provisioning'}; name the rules in prometheus.yml.",
    )


def _apply(api: Grafana, pending: list[Change], folder_uid: str | None) -> None:
    done: list[str] = []
    for change in pending:
        try:
            folder_uid = api.apply(change, folder_uid)
        except CommandError as error:
            applied = f"applied before it: {', '.join(done)}; a second push goes on" if done else "nothing was applied"
            message = f"{error.message} ({change.action} {change.kind} {change.name!r}); {applied}"
            raise CommandError(message, code=error.code, status=error.status) from None
        done.append(f"{change.kind} {change.name!r}")


def _print_plan(session: Session, changes: list[Change], url: str) -> None:
    rows: list[tuple[str, str, str]] = []
    for change in changes:
        if change.action == "unchanged":
            continue
        rows.append((change.action, change.kind, change.name))
        if address := _address(change, url):
            rows.append(("", "", f"  {address}"))
        rows += [("", "", f"  {difference.line()}") for difference in change.differences[:SHOWN]]
        if (more := len(change.differences) - SHOWN) > 0:
            rows.append(("", "", f"  and {more} more, which --json has"))
    session.out.table(None, ("change", "of", "name"), rows, empty="Nothing to change.")
    if same := Counter(change.kind for change in changes if change.action == "unchanged"):
        session.out.line("Unchanged: " + ", ".join(f"{count} {kind}{'s'[: count > 1]}" for kind, count in same.items()))


def _address(change: Change, url: str) -> str | None:
    return f"{url}/d/{change.uid}" if change.kind == "dashboard" and change.action != "remove" else None


def _as_json(change: Change, url: str) -> dict[str, object]:
    return {
        "kind": change.kind,
        "action": change.action,
        "name": change.name,
        "uid": change.uid or None,
        "url": _address(change, url),
        "differences": [asdict(difference) for difference in change.differences],
    }
