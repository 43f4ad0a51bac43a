"""Which service a command talks to, with which operator key, and as whom. Pure: the environment is handed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from serve_app.cli.errors import CommandError, usage_error

MOST_OPERATOR = 100  # characters that the service takes


@dataclass(frozen=True)
class Connection:
    """Where the service answers (`url`), where its local state lies (`home`), and how the operator key is found.

    `operator` is how the audit log names who typed the command: what they say of themselves, beside the key's print.
    """

    url: str
    home: Path
    key_file: Path
    key_in_environment: str | None
    operator: str = ""

    @property
    def is_local(self) -> bool:
        """Whether the address is this machine's own."""
        host = urlsplit(self.url).hostname or ""
        if host == "localhost":
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def key_is_from_home(self) -> bool:
        """Whether the operator key is the one that the service wrote into its own state folder."""
        return self.key_in_environment is None and self.key_file == home_key_file(self.home)

    def operator_key(self) -> str:
        """Read the operator key. Raises CommandError, naming the places that were looked in."""
        if self.key_in_environment is not None:
            return _printable(self.key_in_environment, "SERVE_APP_OPERATOR_KEY")
        try:
            key = self.key_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise CommandError(
                f"no operator key: {self.key_file} does not exist; start the service once (`make serve`), "
                "set SERVE_APP_OPERATOR_KEY, or pass --operator-key-file",
                code="no_operator_key",
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise CommandError(
                f"can't read the operator key from {self.key_file}: {reason}", code="no_operator_key"
            ) from None
        if not key:
            raise CommandError(f"no operator key: {self.key_file} is empty", code="no_operator_key")
        return _printable(key, str(self.key_file))


def resolve(
    url: str | None,
    key_file: Path | None,
    environment: Mapping[str, str],
    folder: Path,
    *,
    operator: str | None = None,
    somebody: str = "",
) -> Connection:
    """Apply the defaults: options first, then the environment, then the state folder near `folder`.

    `somebody` is the operator's name when none is given. An empty variable counts as unset. `--operator-key-file` wins
    over SERVE_APP_OPERATOR_KEY: what is typed is meant.
    """
    home = _home(environment, folder)
    address = url or environment.get("SERVE_APP_URL") or f"http://127.0.0.1:{environment.get('PORT') or '8000'}"
    parts = urlsplit(address)
    try:
        complete = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # a port that isn't one
        complete = False
    if not complete:
        raise usage_error(f"{address!r} is not an address: it must look like http://127.0.0.1:8000 or https://host")
    return Connection(
        url=address.rstrip("/"),
        home=home,
        key_file=key_file or home_key_file(home),
        key_in_environment=None if key_file else environment.get("SERVE_APP_OPERATOR_KEY") or None,
        operator=_operator(operator or environment.get("SERVE_APP_OPERATOR"), somebody),
    )


def home_key_file(home: Path) -> Path:
    """Where the service keeps the operator key that it made for itself."""
    return home / "secrets" / "operator-key"


def _home(environment: Mapping[str, str], folder: Path) -> Path:
    named = environment.get("SERVE_APP_HOME")
    if named:
        return Path(named).expanduser()
    near = folder / ".serve-app"
    return near if near.is_dir() else Path.home() / ".serve-app"


def _operator(given: str | None, somebody: str) -> str:
    """A name that goes into a header: one that is given must fit, one that was found is made to."""
    if given is None or not given.strip():
        fitting = somebody.encode("ascii", "backslashreplace").decode()
        return "".join(char if char.isprintable() else "?" for char in fitting).strip()[:MOST_OPERATOR]
    name = given.strip()
    if not (name.isascii() and name.isprintable()) or len(name) > MOST_OPERATOR:
        raise usage_error(f"--operator {name!r}: must be 1 to {MOST_OPERATOR} printable ASCII characters")
    return name


def _printable(key: str, source: str) -> str:
    """A key goes into a header: refuse what can't, without showing it."""
    key = key.strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise CommandError(f"the operator key from {source} holds characters that no key has", code="no_operator_key")
    return key
