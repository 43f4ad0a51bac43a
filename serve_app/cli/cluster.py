"""`serve-app cluster certificates`: what Ray needs for TLS between the nodes of a cluster. It asks no service."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.output import CommandError, UsageError

app = typer.Typer(name="cluster", help="The machines of a cluster.")


@command(
    app,
    "certificates",
    examples=(
        "serve-app cluster certificates --out tls head.example,10.0.0.2 gateway1.example,10.0.0.3",
        "serve-app cluster certificates --out tls model7.example,10.0.0.17     a node more, by the same authority",
        "serve-app cluster certificates --out tls --renew head.example,10.0.0.2",
    ),
)
def certificates(
    session: Session,
    nodes: Annotated[
        list[str],
        typer.Argument(
            metavar="NODE...", help="Names and addresses of one node, with commas. The first names its folder."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Kept private: it has the authority's key.")],
    renew: Annotated[bool, typer.Option("--renew", help="Replace the certificates of these nodes.")] = False,
    installed_at: Annotated[Path, typer.Option(metavar="FOLDER", help="Where a node will have its files.")] = Path(
        "/etc/serve-app/tls"
    ),
) -> None:
    """Make certificates for RAY_USE_TLS: an authority, once, and a folder of files for each node.

    Copy its folder to each node, load `ray-tls.env` before `ray start`, and restart all nodes together: those with TLS
    and those without can't talk to each other.
    """
    from serve_app.cli import node_certificates  # loads what makes certificates

    hosts = [tuple(name for part in node.split(",") if (name := part.strip())) for node in nodes]
    for given, node in zip(nodes, hosts, strict=True):
        if not node or not all(node_certificates.is_host(name) for name in node):
            raise UsageError(f"NODE {given!r}: must be names or addresses of a machine, as gateway1.example,10.0.0.3")
    if len({node[0] for node in hosts}) < len(hosts):
        raise UsageError("two NODEs begin with the same name, which is that of their folder")
    try:
        made = node_certificates.make(out, hosts, installed_at, renew=renew, now=datetime.now(UTC))
    except node_certificates.CertificatesError as error:
        raise CommandError(str(error), code="certificates") from None
    session.out.record(
        {
            "authority": str(made.authority),
            "nodes": [
                {"node": one.name, "folder": str(one.folder), "ends": one.ends.isoformat()} for one in made.nodes
            ],
        },
        [
            ("authority", made.authority),
            *((one.name, f"{one.folder}, until {one.ends:%Y-%m-%d}") for one in made.nodes),
        ],
        note=f"\nCopy each folder to {installed_at} of its node, and keep {made.authority.with_name('ca-key.pem')} off "
        "the nodes.",
    )
