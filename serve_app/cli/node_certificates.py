"""The files of `serve-app cluster certificates`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

from serve_app.certificates import Signed, make_authority, make_certificate, read_signed, write_private

LOOPBACK = ("localhost", "127.0.0.1")  # processes of one node also talk to each other
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?)*", re.I)


class CertificatesError(Exception):
    """One line for the operator."""


@dataclass(frozen=True, slots=True)
class NodeFiles:
    name: str
    folder: Path
    ends: datetime


@dataclass(frozen=True, slots=True)
class Made:
    authority: Path
    nodes: tuple[NodeFiles, ...]


def is_host(name: str) -> bool:
    """Whether a certificate can be for it: a name or an address."""
    try:
        ip_address(name)
    except ValueError:
        is_number = name.rpartition(".")[2].isdigit()  # of an address with a mistake in it
        return _NAME.fullmatch(name) is not None and not is_number
    return True


def make(out: Path, nodes: Sequence[Sequence[str]], installed_at: Path, *, renew: bool, now: datetime) -> Made:
    """The authority, where there is none, and a folder for each node. Nothing is written if one can't be.

    Raises CertificatesError.
    """
    folders = [out / node[0].replace(":", "-") for node in nodes]
    if not renew and (there := [folder for folder in folders if folder.exists()]):
        raise CertificatesError(f"{there[0]} is there already: give --renew to replace its certificate")
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(out, now)
        made = []
        for folder, node in zip(folders, nodes, strict=True):
            hosts = tuple(dict.fromkeys([*node, *LOOPBACK]))
            made.append(_node(authority, folder, hosts, installed_at, now))
    except OSError as error:
        raise CertificatesError(f"{error.filename or out}: {error.strerror}") from None
    return Made(out / "ca.pem", tuple(made))


def _authority(out: Path, now: datetime) -> Signed:
    certificate, key = out / "ca.pem", out / "ca-key.pem"
    if certificate.exists() != key.exists():
        lost = key if certificate.exists() else certificate
        raise CertificatesError(f"{lost} is missing: restore it, or name a new folder and replace every node's files")
    if not key.exists():
        made = make_authority("serve-app cluster", now)
        write_private(key, made.key_pem)
        write_private(certificate, made.certificate_pem)
    try:
        found = read_signed(certificate, key)
    except ValueError as error:
        raise CertificatesError(f"the authority in {out} can't be read: {error}") from None
    if found.certificate.not_valid_after_utc <= now:
        raise CertificatesError(f"the authority in {out} has ended: name a new folder and replace every node's files")
    return found


def _node(authority: Signed, folder: Path, hosts: Sequence[str], installed_at: Path, now: datetime) -> NodeFiles:
    made = make_certificate(authority, hosts, now)
    folder.mkdir(mode=0o700, exist_ok=True)
    write_private(folder / "ca.pem", authority.certificate_pem)
    write_private(folder / "node.pem", made.certificate_pem)
    write_private(folder / "node-key.pem", made.key_pem)
    files = {"SERVER_CERT": "node.pem", "SERVER_KEY": "node-key.pem", "CA_CERT": "ca.pem"}
    lines = [
        "RAY_USE_TLS=1",
        *(f"RAY_TLS_{name}={shlex.quote(str(installed_at / file))}" for name, file in files.items()),
    ]
    write_private(folder / "ray-tls.env", "\n".join([*lines, ""]).encode())
    return NodeFiles(hosts[0], folder, made.certificate.not_valid_after_utc)
