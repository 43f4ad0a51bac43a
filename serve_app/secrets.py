"""The service's two secrets: the operator key and the secret under which API keys are hashed.

From the environment on a cluster (SERVE_APP_OPERATOR_KEY, SERVE_APP_KEY_SECRET); else files of the state folder with
mode 0600, made on first use.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, repr=False)
class Secrets:
    """Not for logs: it has no repr."""

    operator_key: str
    key_secret: bytes


def load(home: Path) -> Secrets:
    """The secrets of the service whose state folder is `home`; missing ones are made."""
    return Secrets(
        operator_key=os.environ.get("SERVE_APP_OPERATOR_KEY") or secret_file(home, "operator-key"),
        key_secret=(os.environ.get("SERVE_APP_KEY_SECRET") or secret_file(home, "key-secret")).encode(),
    )


def secret_file(home: Path, name: str, value: str | None = None) -> str:
    """The content of `home/secrets/name`; written with `value`, or a random one, when it is not there."""
    folder = home / "secrets"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / name
    if not path.exists():
        descriptor, draft = tempfile.mkstemp(prefix=f".{name}-", dir=folder)  # readable by its owner alone
        with os.fdopen(descriptor, "w") as file:
            file.write(value or secrets.token_urlsafe(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            # A link fails where a rename would replace what another process has just made.
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(draft)
    return path.read_text().strip()
