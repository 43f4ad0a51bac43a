"""The dashboards and rules to install in a Grafana: those of this package, or of a folder."""

from __future__ import annotations

import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.output import CommandError

Json = dict[str, Any]

TAG = "serve-app"  # on every pushed dashboard
UID_PREFIX = "serve-app-"
RULES = "rules.yaml"
DEFAULT_SOURCE = "serve-app Prometheus"


def read_boards(folder: Path | None) -> list[Json]:
    """Returns the dashboards of `folder`, or of this package. Raises CommandError that names the faulty file."""
    source = _source(folder)
    names = sorted(entry.name for entry in source.iterdir()) if source.is_dir() else []
    boards = [_board(source / name, name) for name in names if name.endswith(".json")]
    if not boards:
        raise CommandError(f"no dashboards in {folder}: name their folder with --from", code="no_dashboards")
    if len({board["uid"] for board in boards}) < len(boards):
        raise CommandError(f"two dashboards in {folder} have the same uid", code="bad_dashboard")
    return boards


def read_rules(folder: Path | None) -> str:
    """Returns the text of the Prometheus rule file. Raises CommandError."""
    try:
        text = (_source(folder) / RULES).read_text(encoding="utf-8")
        yaml.safe_load(text)["groups"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CommandError(f"{RULES} is not a file of Prometheus rules: {error}", code="bad_rules") from None
    return text


def data_source(name: str, prometheus: str) -> Json:
    """Returns the body of a Prometheus data source for Grafana."""
    return {
        "name": name,
        "uid": "serve-app-prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus,
        "jsonData": {"httpMethod": "POST"},
    }


def with_source(board: Json, uid: str, name: str) -> Json:
    """Returns the dashboard with our tag and with a data source selected."""
    selected = {"text": name, "value": uid, "selected": True}
    variables = [
        {**variable, "current": selected} if variable["type"] == "datasource" else variable
        for variable in board["templating"]["list"]
    ]
    tags = list(dict.fromkeys([*board.get("tags", []), TAG]))
    return {**board, "tags": tags, "templating": {**board["templating"], "list": variables}}


def _source(folder: Path | None) -> Traversable:
    return files("serve_app.boards") if folder is None else folder


def _board(file: Traversable, name: str) -> Json:
    try:
        board: Json = json.loads(file.read_text(encoding="utf-8"))
        if not (board["uid"] and board["title"] and all(variable["type"] for variable in board["templating"]["list"])):
            raise ValueError("no uid or title")
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{name} is not a Grafana dashboard: {error}", code="bad_dashboard") from None
    if not board["uid"].startswith(UID_PREFIX):
        raise CommandError(f"{name}: its uid must begin with {UID_PREFIX}", code="bad_dashboard")
    return board
