"""Lists all boards, and the files for Grafana."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import capacity, cluster, engine, money, users

FOLDER: Final = Path("serve_app/boards")
MODULES: Final = (users, capacity, engine, money, cluster)


def documents() -> list[dict[str, Any]]:
    """Returns the boards, as in their JSON files."""
    return [json.loads(json.dumps(module.BOARD, cls=JSONEncoder)) for module in MODULES]


def files() -> dict[Path, str]:
    """Returns the contents of the files, by their paths in the repository."""
    return {
        FOLDER / f"{board['uid']}.json": json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for board in documents()
    }
