"""`serve-app dashboards push`: put the dashboards of this repository into a Grafana."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

import serve_app
from serve_app.cli.command import Session, command
from serve_app.cli.connection import check_way
from serve_app.cli.output import CommandError, UsageError

if TYPE_CHECKING:
    from grafana_client import GrafanaApi

app = typer.Typer(name="dashboards", help="Grafana dashboards.")

TIMEOUT_S = 10.0


@command(app, "push")
def push_dashboards(
    session: Session,
    grafana: Annotated[str, typer.Option(metavar="URL", help="Address of Grafana; may hold user:password@.")],
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", envvar="GRAFANA_TOKEN", help="Service account token.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the token.")] = None,
    folder: Annotated[str, typer.Option(metavar="NAME", help="Folder; made if there is none.")] = "serve-app",
    datasource: Annotated[
        str | None, typer.Option(metavar="NAME", help="Prometheus data source to show first.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Where the dashboards lie. [dashboards/]")
    ] = None,
) -> None:
    """Create or overwrite every dashboard in dashboards/ and print its address."""
    origin, prefix, login = _address_parts(grafana)
    boards = _read_dashboards(source or _default_folder())
    credential = _read_token(token, token_file) or login
    if credential is None:
        raise UsageError("Grafana wants --token, --token-file, GRAFANA_TOKEN, or user:password in the address")
    check_way(origin + prefix, "Grafana's credential", session.connection.insecure)
    from grafana_client import GrafanaApi

    pushed = []
    with _grafana_errors(origin + prefix):
        # grafana-client puts the path in front of `api`, so it must end with a slash.
        api = GrafanaApi.from_url(f"{origin}{prefix}/", credential=credential, timeout=TIMEOUT_S)
        folder_uid = _folder_uid(api, folder)
        selected = _datasource(api, datasource) if datasource is not None else None
        for board in boards:
            payload = {
                "dashboard": _prepared(board, selected),
                "folderUid": folder_uid,
                "overwrite": True,
                "message": f"serve-app {serve_app.__version__}",
            }
            response = api.dashboard.update_dashboard(payload)
            pushed.append({"title": board["title"], "uid": response["uid"], "url": origin + response["url"]})
    session.out.table(
        {"data": pushed},
        ("dashboard", "address"),
        [(board["title"], board["url"]) for board in pushed],
        empty="Nothing to push.",
    )


def _prepared(board: dict[str, Any], source: dict[str, Any] | None) -> dict[str, Any]:
    """The dashboard for Grafana: without an id (the uid decides), with the given data source selected."""
    variables = board["templating"]["list"]
    if source is not None:
        selected = {"text": source["name"], "value": source["uid"], "selected": True}
        variables = [{**v, "current": selected} if v["type"] == "datasource" else v for v in variables]
    return {**board, "id": None, "templating": {**board["templating"], "list": variables}}


def _folder_uid(api: GrafanaApi, title: str) -> str:
    for folder in api.folder.get_all_folders():
        if folder["title"] == title:
            return str(folder["uid"])
    return str(api.folder.create_folder(title)["uid"])


def _datasource(api: GrafanaApi, name: str) -> dict[str, Any]:
    sources = [source for source in api.datasource.list_datasources() if source["type"] == "prometheus"]
    for source in sources:
        if source["name"] == name:
            return dict(source)
    known = ", ".join(source["name"] for source in sources) or "none"
    raise CommandError(f"Grafana has no Prometheus data source {name!r}; it has: {known}", code="no_datasource")


@contextlib.contextmanager
def _grafana_errors(url: str) -> Iterator[None]:
    """Turns what grafana-client and its HTTP library raise into one line without the credential."""
    from grafana_client.client import GrafanaException, GrafanaTimeoutError

    try:
        yield
    except GrafanaTimeoutError:
        raise CommandError(f"Grafana at {url} did not answer within {TIMEOUT_S:.0f} s", code="unreachable") from None
    except GrafanaException as error:
        status = error.status_code
        if status == 401:
            reason = "the token or password is not accepted"
        elif status == 403:
            reason = "the token may not do this: its service account needs the role Editor"
        else:
            reason = str(error.message).splitlines()[0]
        raise CommandError(f"Grafana at {url}: {reason}", code="grafana", status=status or None) from None
    except (ValueError, KeyError, TypeError):
        raise CommandError(
            f"{url} does not answer like Grafana: check the address and its path", code="grafana"
        ) from None
    except OSError:  # of which the HTTP library's errors of connection are subclasses
        raise CommandError(f"no Grafana at {url}: check the address", code="unreachable") from None


def _address_parts(url: str) -> tuple[str, str, tuple[str, str] | None]:
    """Split an address into origin, path prefix, and the login that it may hold."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = None
    if port is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("--grafana must look like http://127.0.0.1:3000 or https://grafana.example.com/path")
    login = (unquote(parts.username), unquote(parts.password)) if parts.username and parts.password else None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{port}", parts.path.rstrip("/"), login


def _read_token(token: str | None, token_file: Path | None) -> str | None:
    """The token; a file that is named wins over the environment."""
    if token_file is None:
        return token or None
    try:
        text = token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CommandError(f"can't read the token from {token_file}: {error.strerror}", code="no_token") from None
    if not text:
        raise CommandError(f"{token_file} is empty", code="no_token")
    return text


def _default_folder() -> Path:
    """dashboards/ beside the package in a checkout, else in the working directory."""
    beside = Path(serve_app.__file__).parent.parent / "dashboards"
    return beside if beside.is_dir() else Path("dashboards")


def _read_dashboards(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise CommandError(f"no dashboards in {folder}: name their folder with --from", code="no_dashboards")
    boards = []
    for path in files:
        try:
            board = json.loads(path.read_text(encoding="utf-8"))
            if not (board["uid"] and board["title"] and isinstance(board["templating"]["list"], list)):
                raise ValueError("no uid or title")
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{path} is not a Grafana dashboard: {error}", code="bad_dashboard") from None
        boards.append(board)
    return boards
