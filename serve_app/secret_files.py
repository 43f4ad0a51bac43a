"""Loads the service's two secrets: the operator key, and the secret key, which encrypts secrets in the ledger.

On a cluster they come from the environment (SERVE_APP_OPERATOR_KEY, SERVE_APP_SECRET_KEY). On one machine
(`settings.keeps_local_state`) they are files in the state folder with mode 0600, created on first use.

During a rotation, the previous secret is valid too. It comes from SERVE_APP_OPERATOR_KEY_PREVIOUS or
SERVE_APP_SECRET_KEY_PREVIOUS, or from a file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from serve_app.settings import SettingsError, is_placeholder, keeps_local_state
from serve_app.storage.sealing import SecretKeys

MIN_LENGTH: Final = 16  # characters; generated secrets have 43
_VARIABLES: Final = (
    "SERVE_APP_OPERATOR_KEY",
    "SERVE_APP_OPERATOR_KEY_PREVIOUS",
    "SERVE_APP_SECRET_KEY",
    "SERVE_APP_SECRET_KEY_PREVIOUS",
    "SERVE_APP_DATABASE_URL",
    "SERVE_APP_STRIPE_KEY",
    "SERVE_APP_STRIPE_WEBHOOK_SECRET",
    "SERVE_APP_SMTP_PASSWORD",
    "SERVE_APP_OIDC_SECRET",
)


@dataclass(frozen=True, slots=True, repr=False)
class Secrets:
    """The service's secrets. They have no repr, so that no log shows them."""

    operator_key: str
    secret_keys: SecretKeys
    previous_operator_key: str = ""  # empty: none

    @property
    def operator_keys(self) -> tuple[str, ...]:
        """All valid operator keys."""
        return (self.operator_key, *filter(None, [self.previous_operator_key]))


def load_secrets(home: Path) -> Secrets:
    """Loads the secrets of the service whose state folder is `home`. On one machine, creates missing secrets.

    Raises SettingsError if a secret is missing on a cluster, is easy to guess, or has the value of another secret.
    """
    secret_key = _secret("SERVE_APP_SECRET_KEY", home, "secret-key")
    former = _previous("SERVE_APP_SECRET_KEY_PREVIOUS", home, "secret-key.previous")
    operator_key = _secret("SERVE_APP_OPERATOR_KEY", home, "operator-key")
    former_operator_key = _previous("SERVE_APP_OPERATOR_KEY_PREVIOUS", home, "operator-key.previous")
    loaded = {
        "SERVE_APP_SECRET_KEY": secret_key,
        "SERVE_APP_SECRET_KEY_PREVIOUS": former,
        "SERVE_APP_OPERATOR_KEY": operator_key,
        "SERVE_APP_OPERATOR_KEY_PREVIOUS": former_operator_key,
    }
    _expect_different(loaded)
    return Secrets(
        operator_key=operator_key,
        secret_keys=SecretKeys(secret_key.encode(), former.encode()),
        previous_operator_key=former_operator_key,
    )


def _expect_different(loaded: Mapping[str, str]) -> None:
    """Raises SettingsError if two secrets have the same value: everyone who may know one would then know both.

    `loaded` has the secrets by variable. They are also compared with the secrets that are only in the environment.
    """
    others = {name: os.environ.get(name, "").strip() for name in (*_VARIABLES, "RAY_AUTH_TOKEN", "PGPASSWORD")}
    with contextlib.suppress(ValueError):  # an invalid URL is reported when the ledger connects to it
        password = unquote(urlsplit(others.pop("SERVE_APP_DATABASE_URL")).password or "")
        if password != others["PGPASSWORD"]:  # these two may be equal: both are the database's password
            others["the password in SERVE_APP_DATABASE_URL"] = password
    names: dict[str, str] = {}
    for name, value in {**others, **loaded}.items():
        if value and (same := names.setdefault(value, name)) != name:
            raise SettingsError(
                f"{same} and {name}, or their files in `secrets` of the state folder: the same value; give each "
                "secret its own random value (openssl rand -base64 32)"
            )


def forget_environment() -> None:
    """Removes the secrets of gateway, limiter and accounting from the environment of this process."""
    for variable in _VARIABLES:
        os.environ.pop(variable, None)


def _previous(variable: str, home: Path, name: str) -> str:
    """Returns the previous value of a secret, which is valid during a rotation; empty if there is none.

    Raises SettingsError.
    """
    source, value = variable, os.environ.get(variable, "").strip()
    path = home / "secrets" / name
    if not value and keeps_local_state() and path.exists():
        source, value = str(path), path.read_text().strip()
        if not value:
            raise SettingsError(f"{path}: empty; remove it, or write the secret that was valid before")
    return _checked(source, value) if value else ""


def _secret(variable: str, home: Path, name: str) -> str:
    source, value = variable, os.environ.get(variable, "").strip()
    if not value:
        if not keeps_local_state():
            # A file would exist only on this node: other nodes would create different secrets.
            raise SettingsError(
                f"{variable}: not set; give every gateway node the same random value (openssl rand -base64 32), "
                "or set SERVE_APP_LOCAL_STATE=1 if the whole service runs on this one machine"
            )
        source, value = str(home / "secrets" / name), secret_file(home, name)
    return _checked(source, value)


def _checked(source: str, value: str) -> str:
    if is_placeholder(value) or len(value) < MIN_LENGTH:
        what = "still the placeholder of a template" if is_placeholder(value) else f"only {len(value)} characters long"
        raise SettingsError(
            f"{source}: {what}; write a random value of at least {MIN_LENGTH} characters (openssl rand -base64 32)"
        )
    return value


def secret_file(home: Path, name: str, value: str | None = None) -> str:
    """Returns the content of `home/secrets/name`. Creates a missing file with `value`, or a random value."""
    folder = home / "secrets"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / name
    if not path.exists():
        descriptor, draft = tempfile.mkstemp(prefix=f".{name}-", dir=folder)  # readable only by its owner
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(value or secrets.token_urlsafe(32))
                file.flush()
                os.fsync(file.fileno())
            # A rename would replace a file that another process has just created; a link fails.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
    return path.read_text().strip()
