"""`serve-app dashboards …`: installs the shipped dashboards in a Grafana, over its API or as files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

import serve_app
from serve_app.cli.command import Session, command
from serve_app.cli.connection import check_way
from serve_app.cli.grafana.address import parse_address, read_token
from serve_app.cli.grafana.files import provisioning, write_files
from serve_app.cli.grafana.shipped import (
    DEFAULT_SOURCE,
    TAG,
    UID_PREFIX,
    Json,
    data_source,
    read_boards,
    read_rules,
    with_source,
)
from serve_app.cli.output import CommandError, UsageError

app = typer.Typer(name="dashboards", help="Grafana dashboards and Prometheus rules.")

TIMEOUT_S = 10.0

Folder = Annotated[str, typer.Option(metavar="NAME", help="Folder in Grafana.")]


@command(
    app,
    "push",
    examples=(
        "serve-app dashboards push --grafana https://grafana.example.com --token-file token",
        "serve-app dashboards push --grafana http://127.0.0.1:3000 --prometheus http://127.0.0.1:9090",
    ),
)
def push_dashboards(
    session: Session,
    grafana: Annotated[str, typer.Option(metavar="URL", help="URL of Grafana; may contain user:password@.")],
    *,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", envvar="GRAFANA_TOKEN", help="Token of a service account.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the token.")] = None,
    folder: Folder = "serve-app",
    datasource: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Prometheus data source; default: Grafana's default, or its only one."),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="URL", help="Create a data source for this Prometheus, or change its URL.")
    ] = None,
) -> None:
    """Create or replace the shipped dashboards in Grafana, and remove dashboards that are no longer shipped.

    Grafana keeps earlier versions of a dashboard. Other dashboards stay unchanged.
    """
    address = parse_address(grafana)
    if prometheus is not None:
        parse_address(prometheus, "--prometheus")
    credential = read_token(token, token_file) or address.login
    if credential is None:
        raise UsageError("Grafana needs --token, --token-file, GRAFANA_TOKEN, or user:password in the address")
    check_way(address.url, "Grafana's credential", session.connection.insecure)
    boards = read_boards()
    with _grafana(address.url, credential) as api:
        name, uid = _use_source(api, datasource, prometheus)
        folder_uid = _use_folder(api, folder)
        for board in boards:
            message = f"serve-app {serve_app.__version__}"
            body = {"dashboard": with_source(board, uid, name), "folderUid": folder_uid}
            api.dashboard.update_dashboard({**body, "overwrite": True, "message": message})
        ours = [one for one in api.search.search_dashboards(tag=TAG) if one["uid"].startswith(UID_PREFIX)]
        removed = [one for one in ours if one["uid"] not in {board["uid"] for board in boards}]
        for one in removed:
            api.dashboard.delete_dashboard(one["uid"])
    rows = [{"action": "pushed", "name": one["title"], "url": f"{address.url}/d/{one['uid']}"} for one in boards]
    rows += [{"action": "removed", "name": one["title"], "url": None} for one in removed]
    session.out.table(
        {"data": rows},
        ("dashboard", "action", "address"),
        [(row["name"], row["action"], row["url"] or "") for row in rows],
        ids=("address",),
        empty="",
    )


@command(app, "provision", examples=("serve-app dashboards provision --to /etc/serve-app-grafana",))
def provision_dashboards(
    session: Session,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; created if it does not exist.")],
    *,
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="URL at which Grafana reaches Prometheus.")
    ] = "http://127.0.0.1:9090",
    datasource: Annotated[str, typer.Option(metavar="NAME", help="Name of the data source.")] = DEFAULT_SOURCE,
    folder: Folder = "serve-app",
    seen_at: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Path at which Grafana sees FOLDER, if it differs, as in a container."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that serve-app did not write.")] = False,
) -> None:
    """Write the files for Grafana's file provisioning, and the rules for Prometheus."""
    parse_address(prometheus, "--prometheus")
    path = PurePosixPath(seen_at or to.absolute().as_posix())
    texts = (read_boards(), read_rules())
    files = provisioning(*texts, folder=folder, datasource=datasource, prometheus=prometheus, seen_at=path)
    written = write_files(to, files, force=force)
    session.out.table(
        {"data": [{"path": str(to / file.path), "action": file.action} for file in written]},
        ("file", "action"),
        [(to / file.path, file.action) for file in written],
        empty="Nothing to write.",
        footer=f"Start Grafana with GF_PATHS_PROVISIONING={path / 'provisioning'}; add the rules to prometheus.yml.",
    )


def _use_source(api: Any, name: str | None, prometheus: str | None) -> tuple[str, str]:
    """Returns name and uid of the data source. Creates or changes it first if `prometheus` is given."""
    sources: list[Json] = [one for one in api.datasource.list_datasources() if one["type"] == "prometheus"]
    if prometheus is not None:
        body = data_source(name or DEFAULT_SOURCE, prometheus)
        if any(one["uid"] == body["uid"] for one in sources):
            api.datasource.update_datasource_by_uid(body["uid"], body)
        else:
            api.datasource.create_datasource(body)
        return body["name"], body["uid"]
    if name is None:
        chosen = [one for one in sources if one.get("isDefault")] or sources[: len(sources) == 1]
    else:
        chosen = [one for one in sources if one["name"] == name]
    if not chosen:
        known = ", ".join(one["name"] for one in sources) or "none"
        raise CommandError(
            f"choose a Prometheus data source with --datasource, or create one with --prometheus; Grafana has: {known}",
            code="no_datasource",
        )
    return chosen[0]["name"], chosen[0]["uid"]


def _use_folder(api: Any, title: str) -> str:
    folders: list[Json] = api.folder.get_all_folders()
    found = next((one for one in folders if one["title"] == title), None) or api.folder.create_folder(title)
    return str(found["uid"])


@contextlib.contextmanager
def _grafana(url: str, credential: str | tuple[str, str]) -> Iterator[Any]:
    """Yields a client of Grafana's API. Every failure becomes a one-line CommandError."""
    from grafana_client import GrafanaApi
    from grafana_client.client import GrafanaException, GrafanaTimeoutError

    # grafana-client appends `api` directly to the URL's path, so the path must end with a slash.
    api = GrafanaApi.from_url(f"{url}/", credential=credential, timeout=TIMEOUT_S)
    try:
        yield api
    except GrafanaTimeoutError:
        raise CommandError(f"Grafana at {url} did not answer within {TIMEOUT_S:.0f} s", code="unreachable") from None
    except GrafanaException as error:
        raise CommandError(
            f"Grafana at {url}: {_reason(error)}", code="grafana", status=error.status_code or None
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"{url} does not answer like Grafana: check the address and its path"
        raise CommandError(message, code="grafana") from None
    except OSError:  # the HTTP library's connection errors are subclasses
        raise CommandError(f"no Grafana at {url}: check the address", code="unreachable") from None


def _reason(error: Any) -> str:
    if error.status_code == 401:
        return "the token or password is not accepted"
    if error.status_code == 403:
        return "no permission: the service account of the token needs the role Editor, or Admin for --prometheus"
    response = error.response
    message = response.get("message") if isinstance(response, dict) else None
    return str(message or error.message).splitlines()[0]
