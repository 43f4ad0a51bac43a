"""A small folder of dashboards and rules to push."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]


def board(name: str, *titles: str) -> Json:
    panels = [
        {"id": number, "title": title, "type": "timeseries", "targets": [{"refId": "A", "expr": f"ray_{number}"}]}
        for number, title in enumerate(titles or ("Requests", "Tokens"), 1)
    ]
    variables = [{"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}}]
    return {
        "uid": f"serve-app-{name}",
        "title": f"serve-app: {name}",
        "tags": ["llm"],
        "schemaVersion": 41,
        "templating": {"list": variables},
        "panels": panels,
    }


RULES: Json = {
    "groups": [
        {
            "name": "money",
            "interval": "30s",
            "rules": [
                {"record": "serve_app:spend", "expr": "sum(ray_serve_app_charged_total)"},
                {
                    "alert": "Stuck",
                    "expr": "max by (cluster) (ray_serve_app_stuck_settlements) == 0",
                    "for": "60m",
                    "labels": {"severity": "page"},
                    "annotations": {"summary": "{{ $value | humanize }} are stuck", "action": "Costs $value each"},
                },
                {"alert": "Spool", "expr": "ray_serve_app_spool_age_seconds > 60", "labels": {"severity": "page"}},
                {"alert": "Spool", "expr": "ray_serve_app_spool_age_seconds > 9", "labels": {"severity": "warn"}},
            ],
        },
        {"name": "recorded only", "rules": [{"record": "serve_app:x", "expr": "1"}]},
        {"name": "users/speed", "rules": [{"alert": "Slow", "expr": "serve_app:ttft > 10", "for": "5m"}]},
    ]
}


def write_shipped(folder: Path, *boards: Json, rules: Json | None = None) -> Path:
    """Replaces what is in the folder."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    for one in boards or (board("users"), board("money")):
        (folder / f"{one['uid']}.json").write_text(json.dumps(one), encoding="utf-8")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules if rules is not None else RULES), encoding="utf-8")
    return folder
