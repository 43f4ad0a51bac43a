"""The dashboards and rules of this package, to install in a Grafana."""

from __future__ import annotations

import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

Json = dict[str, Any]

TAG = "serve-app"  # on every pushed dashboard
UID_PREFIX = "serve-app-"
DEFAULT_SOURCE = "serve-app Prometheus"
SHIPPED: Traversable = files("serve_app.boards")


def read_boards() -> list[Json]:
    """Returns the dashboards."""
    boards = sorted((file for file in SHIPPED.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return [json.loads(file.read_text(encoding="utf-8")) for file in boards]


def read_rules() -> str:
    """Returns the text of the Prometheus rule file."""
    return (SHIPPED / "rules.yaml").read_text(encoding="utf-8")


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
    """Returns the dashboard with TAG as a tag and with this data source selected."""
    selected = {"text": name, "value": uid, "selected": True}
    variables = [
        {**variable, "current": selected} if variable["type"] == "datasource" else variable
        for variable in board["templating"]["list"]
    ]
    tags = list(dict.fromkeys([*board.get("tags", []), TAG]))
    return {**board, "tags": tags, "templating": {**board["templating"], "list": variables}}
