"""`serve-app cluster`: creates the files that Ray needs for TLS between the nodes of a cluster. It calls no service."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.output import CommandError, UsageError

app = typer.Typer(name="cluster", help="TLS files for the nodes of a cluster.")


@command(
    app,
    "certificates",
    examples=(
        "serve-app cluster certificates --out tls head.example,10.0.0.2 gateway1.example,10.0.0.3",
        "serve-app cluster certificates --out tls model7.example,10.0.0.17     another node, same authority",
        "serve-app cluster certificates --out tls --renew head.example,10.0.0.2",
        "serve-app cluster certificates --out authority     only the authority, for pods",
    ),
)
def certificates(
    session: Session,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FOLDER", help="Output folder. It holds the authority's key: keep it private."),
    ],
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NODE]...",
            help="Comma-separated names and addresses of one node. The first is the name of its folder.",
        ),
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the certificates of these nodes.")] = False,
    installed_at: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder on the nodes in which you install the files.")
    ] = Path("/etc/serve-app/tls"),
) -> None:
    """Create certificates for RAY_USE_TLS: an authority, once, and a folder of files for each node.

    Copy each folder to its node, load `ray-tls.env` before `ray start`, and restart all nodes together: nodes with TLS
    and nodes without TLS can't talk to each other.
    """
    from serve_app.cli import node_certificates  # imported here, because it loads the certificate library

    hosts = [_hosts(node) for node in nodes or []]
    if renew and not hosts:
        raise UsageError("--renew: name the nodes whose certificates to replace")
    if len({node[0] for node in hosts}) < len(hosts):
        raise UsageError("two NODEs begin with the same name, so they would share a folder")
    try:
        made = node_certificates.make(out, hosts, installed_at, renew=renew, now=datetime.now(UTC))
    except node_certificates.CertificatesError as error:
        raise CommandError(str(error), code="certificates") from None
    key = made.authority.with_name(node_certificates.AUTHORITY_KEY)
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
        note=f"\nCopy each folder to {installed_at} on its node, and keep {key} off the nodes."
        if made.nodes
        else f"\n{key} can sign certificates for any node. Store it and {made.authority.name} in a Kubernetes Secret, "
        "then delete the folder.",
    )


@command(
    app,
    "node-certificate",
    examples=(
        "serve-app cluster node-certificate --authority /etc/serve-app/authority --to /etc/serve-app/tls 10.0.0.7",
    ),
)
def node_certificate(
    session: Session,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Comma-separated names and addresses of this node.")],
    authority: Annotated[
        Path,
        typer.Option(
            "--authority", metavar="FOLDER", help="Folder with ca.pem and ca-key.pem. Only this command needs it."
        ),
    ],
    to: Annotated[
        Path, typer.Option("--to", metavar="FOLDER", help="Output folder for node.pem, node-key.pem and ca.pem.")
    ],
) -> None:
    """Create the certificate of this node at startup, when a pod knows its address.

    Run it in an init container, before Ray. It replaces existing files. Only the user that runs this command can read
    the files, so Ray must run as that user.
    """
    from serve_app.cli import node_certificates

    try:
        made = node_certificates.make_own(authority, to, _hosts(node), datetime.now(UTC))
    except node_certificates.CertificatesError as error:
        raise CommandError(str(error), code="certificates") from None
    session.out.record(
        {"node": made.name, "folder": str(made.folder), "ends": made.ends.isoformat()},
        [(made.name, f"{made.folder}, until {made.ends:%Y-%m-%d}")],
    )


def _hosts(node: str) -> tuple[str, ...]:
    from serve_app.cli import node_certificates

    hosts = tuple(name for part in node.split(",") if (name := part.strip()))
    if not hosts or not all(node_certificates.is_host(name) for name in hosts):
        raise UsageError(f"NODE {node!r}: must be names or addresses of a machine, such as gateway1.example,10.0.0.3")
    return hosts
