"""Finds the service that a command talks to, the operator key, and the operator's name."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final, cast
from urllib.parse import urlsplit

import typer

from serve_app.cli.output import FORMS, CommandError, Form, UsageError

SHARED_PANEL: Final = "Options of every command"
MAX_OPERATOR = 100  # characters; the maximum that the service accepts


def _forms() -> list[str]:
    """Completes -o."""
    return list(FORMS)


@dataclass(frozen=True)
class SharedOptions:
    """The options that every command has, as given on the command line."""

    output_form: Annotated[
        str | None,
        typer.Option(
            "-o",
            metavar="FORM",
            help="Output: wide (all columns), json, yaml, or name (identifiers only).",
            autocompletion=_forms,
            rich_help_panel=SHARED_PANEL,
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="The same as -o json.", rich_help_panel=SHARED_PANEL)
    ] = False
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Service. [SERVE_APP_URL, else http://127.0.0.1:$PORT]",
            rich_help_panel=SHARED_PANEL,
        ),
    ] = None
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--operator-key-file",
            metavar="FILE",
            help="Operator key. [SERVE_APP_OPERATOR_KEY, else secrets/operator-key in SERVE_APP_HOME]",
            rich_help_panel=SHARED_PANEL,
        ),
    ] = None
    operator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Your name, for the audit log. [SERVE_APP_OPERATOR, else user@host]",
            rich_help_panel=SHARED_PANEL,
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            metavar="",
            help="Send keys over plain HTTP to a remote machine. [SERVE_APP_INSECURE=1]",
            rich_help_panel=SHARED_PANEL,
        ),
    ] = False

    def over(self, earlier: SharedOptions) -> SharedOptions:
        """Returns these options. Options that are not set come from `earlier`, given before the command's name."""
        return SharedOptions(*(getattr(self, option.name) or getattr(earlier, option.name) for option in fields(self)))

    def checked_form(self) -> Form | None:
        """Returns the form of the output; None means a table. Raises UsageError."""
        if self.output_form is not None and self.output_form not in FORMS:
            raise UsageError(f"-o {self.output_form}: must be one of {', '.join(FORMS)}")
        if self.as_json and self.output_form not in (None, "json"):
            raise UsageError(f"--json and -o {self.output_form} cannot be combined")
        return "json" if self.as_json else cast("Form | None", self.output_form)


@dataclass(frozen=True)
class Connection:
    """The service's URL (`url`), its local state folder (`home`), and the location of the operator key.

    `operator` is a name that the operator chooses for the audit log. The log also has the key's fingerprint.
    """

    url: str
    home: Path
    key_file: Path
    key_in_environment: str | None
    operator: str = ""
    insecure: bool = False
    is_named: bool = False  # whether the operator named the URL, as an option or in the environment

    @property
    def is_local(self) -> bool:
        """Whether the URL is an address of this machine."""
        return _is_local(self.url)

    def is_of_home(self) -> bool | None:
        """Returns whether the URL is that of the last service that used the state folder; None: unknown."""
        from serve_app.local_run import last_port

        port = last_port(self.home)
        return None if port is None else self.is_local and urlsplit(self.url).port == port

    @property
    def authority(self) -> Path | None:
        """Certificate file of the authority that signed this machine's service certificate; None without one."""
        file = self.home / "tls" / "ca.pem"
        return file if self.is_local and self.url.startswith("https://") and file.is_file() else None

    @property
    def key_is_from_home(self) -> bool:
        """Whether the operator key is the one in the service's state folder."""
        return self.key_in_environment is None and self.key_file == _key_file(self.home)

    def operator_key(self) -> str:
        """Reads the operator key, to send it to `url`.

        Raises CommandError if the key is missing or malformed, or if the connection would expose it.
        """
        check_way(self.url, "the operator key", self.insecure)
        if self.key_in_environment is not None:
            return _checked_key(self.key_in_environment, "SERVE_APP_OPERATOR_KEY")
        try:
            key = self.key_file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            problem = (
                f"no operator key: {self.key_file} does not exist; start the service once (`make serve`), "
                "set SERVE_APP_OPERATOR_KEY, or pass --operator-key-file"
            )
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            problem = f"can't read the operator key from {self.key_file}: {reason}"
        else:
            if key:
                return _checked_key(key, str(self.key_file))
            problem = f"no operator key: {self.key_file} is empty"
        raise CommandError(problem, code="no_operator_key")


def resolve(options: SharedOptions, environment: Mapping[str, str], folder: Path) -> Connection:
    """Returns the connection. Options take precedence over the environment, and the environment over the defaults.

    The state folder is SERVE_APP_HOME, else `.serve-app` in `folder` if it exists, else `~/.serve-app`.
    An empty variable counts as unset. `--operator-key-file` takes precedence over SERVE_APP_OPERATOR_KEY.
    """
    near = folder / ".serve-app"
    if environment.get("SERVE_APP_HOME"):
        home = Path(environment["SERVE_APP_HOME"]).expanduser()
    else:
        home = near if near.is_dir() else Path.home() / ".serve-app"
    url = options.url or environment.get("SERVE_APP_URL") or _default_url(environment)
    parts = urlsplit(url)
    try:
        is_complete = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # the port is not a number
        is_complete = False
    if not is_complete:
        raise UsageError(f"{url!r} is not an address: it must look like http://127.0.0.1:8000 or https://host")
    operator = (options.operator or environment.get("SERVE_APP_OPERATOR") or "").strip()
    return Connection(
        url=url.rstrip("/"),
        home=home,
        key_file=options.key_file or _key_file(home),
        key_in_environment=None if options.key_file else environment.get("SERVE_APP_OPERATOR_KEY") or None,
        operator=_checked_operator(operator) if operator else _user_at_host(),
        insecure=options.insecure or environment.get("SERVE_APP_INSECURE") == "1",
        is_named=bool(options.url or environment.get("SERVE_APP_URL") or environment.get("PORT")),
    )


def _default_url(environment: Mapping[str, str]) -> str:
    """Returns the URL of `make serve` with the same PORT and TLS."""
    scheme = "https" if environment.get("TLS") == "1" else "http"
    return f"{scheme}://127.0.0.1:{environment.get('PORT') or '8000'}"


def check_way(url: str, secret: str, insecure: bool) -> None:
    """Raises CommandError if `secret` would be sent unencrypted over a network."""
    if urlsplit(url).scheme == "http" and not insecure and not _is_local(url):
        raise CommandError(
            f"{url} is plain HTTP to another machine, which would show {secret} to the network: use https://, "
            "forward a port to this machine, or pass --insecure (SERVE_APP_INSECURE=1) if you trust the network",
            code="insecure",
        )


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _key_file(home: Path) -> Path:
    """Returns the file of the operator key that the service created."""
    return home / "secrets" / "operator-key"


def _checked_operator(name: str) -> str:
    if not (name.isascii() and name.isprintable()) or len(name) > MAX_OPERATOR:
        raise UsageError(f"--operator {name!r}: must be 1 to {MAX_OPERATOR} printable ASCII characters")
    return name


def _user_at_host() -> str:
    """Returns the default name of the operator, in characters that are valid in a header."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may run as a user without a name
        user = f"uid-{os.getuid()}"
    name = f"{user}@{socket.gethostname()}".encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else "?" for char in name).strip()[:MAX_OPERATOR]


def _checked_key(key: str, source: str) -> str:
    """Returns the key if it is valid in a header. The error does not show the key."""
    key = key.strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise CommandError(
            f"the operator key from {source} contains characters that are not allowed in a key", code="no_operator_key"
        )
    return key
