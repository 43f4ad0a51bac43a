"""Creates a private certificate authority, and certificates that it signs for names and addresses of machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 397  # browsers reject certificates that last longer than 398 days
RENEW_BEFORE = timedelta(days=30)
CLOCKS = timedelta(hours=1)  # certificates are valid from this long ago, because another machine's clock may lag


@dataclass(frozen=True, slots=True, repr=False)
class Signed:
    """A certificate and its key. It has no repr, so that no log shows the key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def make_authority(name: str, now: datetime) -> Signed:
    """Returns an authority. The certificates that it signs cannot sign other certificates."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key, now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return Signed(builder.sign(key, hashes.SHA256()), key)


def make_certificate(authority: Signed, hosts: Sequence[str], now: datetime) -> Signed:
    """Returns a certificate for a server. `hosts` are names and addresses.

    The certificate is also valid for a client, because Ray's nodes are servers and clients.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate.subject
    builder = _builder(_name(hosts[0]), issuer, key, now, CERTIFICATE_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return Signed(builder.sign(authority.key, hashes.SHA256()), key)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file atomically. Only its owner may read it. Replaces an existing file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    temporary.replace(path)


def read_signed(certificate: Path, key: Path) -> Signed:
    """Reads a certificate and its key from two PEM files.

    Raises OSError if a file cannot be read, and ValueError if the content is wrong or the two do not match.
    """
    private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key} is not a key of an elliptic curve")
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    if found.public_key() != private.public_key():
        raise ValueError(f"{key} is not the key of {certificate}")
    return Signed(found, private)


def ends_at(path: Path) -> datetime:
    """Returns when the first certificate of a PEM file expires. Raises OSError, and ValueError if there is none."""
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def needs_renewal(path: Path, now: datetime) -> bool:
    """Returns whether the file's certificate is missing or unreadable, or expires within `RENEW_BEFORE`."""
    try:
        return ends_at(path) - now < RENEW_BEFORE
    except (OSError, ValueError):
        return True


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - CLOCKS)
        .not_valid_after(now.astimezone(UTC) + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
