"""The address of a Grafana, and the credential for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from serve_app.cli.output import CommandError, UsageError


@dataclass(frozen=True)
class Address:
    """The parts of a Grafana's URL: `https://host:port`, the path without a trailing slash, the user and password."""

    origin: str
    prefix: str
    login: tuple[str, str] | None = None

    @property
    def url(self) -> str:
        return self.origin + self.prefix


def parse_address(text: str, option: str = "--grafana") -> Address:
    parts = urlsplit(text)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = None
    if port is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{option} must look like http://127.0.0.1:3000 or https://grafana.example.com/path")
    login = (unquote(parts.username), unquote(parts.password)) if parts.username and parts.password else None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(f"{parts.scheme}://{host}{port}", parts.path.rstrip("/"), login)


def read_token(token: str | None, token_file: Path | None) -> str | None:
    """Returns the token. `token_file` takes precedence over `token`, which may come from the environment."""
    if token_file is None:
        return token or None
    try:
        text = token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CommandError(f"can't read the token from {token_file}: {error.strerror}", code="no_token") from None
    if not text:
        raise CommandError(f"{token_file} is empty", code="no_token")
    return text
