"""The dashboards and rules that are put into a Grafana: those of this package, or of a folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.output import CommandError

Json = dict[str, Any]

TAG = "serve-app"  # on every dashboard that is pushed
UID_PREFIX = "serve-app-"
RULES = "rules.yaml"
DEFAULT_INTERVAL = "1m"  # of a group of rules; Prometheus's own
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


@dataclass(frozen=True)
class Shipped:
    """`boards` as their files have them, the text of the Prometheus rule file and its groups (both empty without)."""

    boards: tuple[Json, ...]
    rules_text: str = ""
    groups: tuple[Json, ...] = ()


def read_shipped(folder: Path | None, *, alerts: bool = True) -> Shipped:
    """Read `folder`, or this package's own files. Raises CommandError that names the file that is wrong."""
    source: Traversable = files("serve_app.boards") if folder is None else folder
    where = str(folder or "serve_app/boards")
    names = sorted(entry.name for entry in source.iterdir()) if source.is_dir() else []
    boards = tuple(_board(source / name, f"{where}/{name}") for name in names if name.endswith(".json"))
    if not boards:
        raise CommandError(f"no dashboards in {where}: name their folder with --from", code="no_dashboards")
    if len({board["uid"] for board in boards}) < len(boards):
        raise CommandError(f"two dashboards in {where} have the same uid", code="bad_dashboard")
    if not alerts:
        return Shipped(boards)
    if RULES not in names:
        raise CommandError(f"no {RULES} in {where}: pass --no-alerts to leave alert rules alone", code="no_rules")
    text = (source / RULES).read_text(encoding="utf-8")
    return Shipped(boards, text, _groups(text, f"{where}/{RULES}"))


def seconds(duration: str) -> float:
    """Of a Prometheus duration such as 1h30m. Raises ValueError."""
    parts = re.findall(r"(\d+)(ms|[smhdwy])", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is no duration")
    return sum(int(number) * _UNITS_S[unit] for number, unit in parts)


def with_source(board: Json, uid: str, name: str) -> Json:
    """The dashboard with our tag, and with a data source selected."""
    selected = {"text": name, "value": uid, "selected": True}
    variables = [
        {**variable, "current": selected} if variable["type"] == "datasource" else variable
        for variable in board["templating"]["list"]
    ]
    tags = list(dict.fromkeys([*board.get("tags", []), TAG]))
    return {**board, "tags": tags, "templating": {**board["templating"], "list": variables}}


def _board(file: Traversable, name: str) -> Json:
    try:
        board: Json = json.loads(file.read_text(encoding="utf-8"))
        if not (board["uid"] and board["title"] and all(variable["type"] for variable in board["templating"]["list"])):
            raise ValueError("no uid or title")
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{name} is not a Grafana dashboard: {error}", code="bad_dashboard") from None
    if not board["uid"].startswith(UID_PREFIX):
        # A later push would not know that it is ours, and never remove it.
        raise CommandError(f"{name}: its uid must begin with {UID_PREFIX}", code="bad_dashboard")
    return board


def _groups(text: str, name: str) -> tuple[Json, ...]:
    try:
        groups = yaml.safe_load(text)["groups"]
        for group in groups:
            seconds(group.get("interval", DEFAULT_INTERVAL))
            for rule in group["rules"]:
                if not (group["name"] and rule["expr"] and rule.keys() & {"alert", "record"}):
                    raise ValueError("a rule has neither alert nor record")
                seconds(rule.get("for", "0s"))
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CommandError(f"{name} is not a file of Prometheus rules: {reason}", code="bad_rules") from None
    return tuple(groups)
