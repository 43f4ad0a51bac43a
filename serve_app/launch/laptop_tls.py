"""The certificate for `make serve TLS=1` and its authority, in the state folder. Clients trust the authority.

Renewing the certificate keeps the authority, so clients need not trust a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from serve_app.certificates import (
    Signed,
    make_authority,
    make_certificate,
    needs_renewal,
    read_signed,
    write_private,
)
from serve_app.launch.preflight import LaunchError

HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class LaptopTls:
    """The files: `authority` is for clients; `served` has the certificate and its key, as HAProxy reads them."""

    authority: Path
    served: Path


def authority_file(home: Path) -> Path:
    return home / "tls" / "ca.pem"


def prepare(home: Path, now: datetime) -> LaptopTls:
    """Creates files that are missing or expire soon. Raises LaunchError for files that can't be read or written."""
    try:
        return _prepared(home, now)
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"the certificate in {home / 'tls'} can't be read or written ({error}): delete that folder; "
            "clients then have to trust a new authority"
        ) from None


def _prepared(home: Path, now: datetime) -> LaptopTls:
    folder = home / "tls"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, key, served = authority_file(home), folder / "ca-key.pem", folder / "server.pem"
    if needs_renewal(authority, now) or not key.exists():
        served.unlink(missing_ok=True)  # it is invalid now, because the previous authority signed it
        made = make_authority("serve-app on this machine", now)
        write_private(key, made.key_pem)
        write_private(authority, made.certificate_pem)
    if needs_renewal(served, now):
        signer: Signed = read_signed(authority, key)
        one = make_certificate(signer, HOSTS, now)
        write_private(served, one.certificate_pem + one.key_pem)
    return LaptopTls(authority, served)
