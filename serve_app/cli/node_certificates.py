"""Creates the files of `serve-app cluster certificates` and `serve-app cluster node-certificate`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

from serve_app.certificates import Signed, make_authority, make_certificate, read_signed, write_private

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # processes of one node also connect to each other
AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca-key.pem"
#: Files of a node, by Ray's environment variables.
FILES = {"RAY_TLS_SERVER_CERT": "node.pem", "RAY_TLS_SERVER_KEY": "node-key.pem", "RAY_TLS_CA_CERT": AUTHORITY}
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?)*", re.I)


class CertificatesError(Exception):
    """A failure. Its message is one line for the operator."""


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
    """Whether a certificate can be issued for `name`: a host name or an address."""
    try:
        ip_address(name)
    except ValueError:
        is_number = name.rpartition(".")[2].isdigit()  # the name ends in a number, like a mistyped address
        return _NAME.fullmatch(name) is not None and not is_number
    return True


def make(out: Path, nodes: Sequence[Sequence[str]], installed_at: Path, *, renew: bool, now: datetime) -> Made:
    """Creates the authority, if there is none, and a folder for each node.

    Without `renew`, writes nothing if one of the folders exists. Raises CertificatesError.
    """
    folders = [out / node[0].replace(":", "-") for node in nodes]
    if not renew and (existing := [folder for folder in folders if folder.exists()]):
        raise CertificatesError(f"{existing[0]} already exists: use --renew to replace its certificate")
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(out, now)
        made = []
        for folder, node in zip(folders, nodes, strict=True):
            folder.mkdir(mode=0o700, exist_ok=True)
            made.append(_node(authority, folder, node, now))
            _write_variables(folder, installed_at)
    except OSError as error:
        raise CertificatesError(f"{error.filename or out}: {error.strerror}") from None
    return Made(out / AUTHORITY, tuple(made))


def make_own(authority: Path, to: Path, node: Sequence[str], now: datetime) -> NodeFiles:
    """Creates the files of one node, on the node. Replaces existing files: a restarted pod has a new address.

    Raises CertificatesError.
    """
    try:
        for name in (AUTHORITY, AUTHORITY_KEY):
            if not (authority / name).exists():
                raise CertificatesError(
                    f"{authority / name} is missing: mount the authority there, as `serve-app cluster certificates` "
                    f"makes it ({AUTHORITY}, {AUTHORITY_KEY})"
                )
        found = _read_authority(authority, now)
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _node(found, to, node, now)
    except OSError as error:
        raise CertificatesError(f"{error.filename or to}: {error.strerror}") from None


def _authority(out: Path, now: datetime) -> Signed:
    certificate, key = out / AUTHORITY, out / AUTHORITY_KEY
    if certificate.exists() != key.exists():
        lost = key if certificate.exists() else certificate
        raise CertificatesError(f"{lost} is missing: restore it, or name a new folder and replace every node's files")
    if not key.exists():
        made = make_authority("serve-app cluster", now)
        write_private(key, made.key_pem)
        write_private(certificate, made.certificate_pem)
    return _read_authority(out, now)


def _read_authority(folder: Path, now: datetime) -> Signed:
    try:
        found = read_signed(folder / AUTHORITY, folder / AUTHORITY_KEY)
    except ValueError as error:
        raise CertificatesError(f"the authority in {folder} can't be read: {error}") from None
    if found.certificate.not_valid_after_utc <= now:
        raise CertificatesError(
            f"the authority in {folder} has expired: make a new one in a new folder, and replace every node's files"
        )
    return found


def _node(authority: Signed, folder: Path, node: Sequence[str], now: datetime) -> NodeFiles:
    made = make_certificate(authority, tuple(dict.fromkeys([*node, *LOOPBACK])), now)
    contents = (made.certificate_pem, made.key_pem, authority.certificate_pem)
    for file, content in zip(FILES.values(), contents, strict=True):
        write_private(folder / file, content)
    return NodeFiles(node[0], folder, made.certificate.not_valid_after_utc)


def _write_variables(folder: Path, installed_at: Path) -> None:
    lines = [f"{name}={shlex.quote(str(installed_at / file))}" for name, file in FILES.items()]
    write_private(folder / "ray-tls.env", "\n".join(["RAY_USE_TLS=1", *lines, ""]).encode())
