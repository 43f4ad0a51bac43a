"""Builds the files for Grafana's file provisioning, and writes them without replacing anyone else's files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import yaml

from serve_app.cli.grafana.shipped import Json, data_source, with_source
from serve_app.cli.output import CommandError

MANIFEST = ".serve-app-files.json"  # lists the files that serve-app wrote, with a digest of each


@dataclass(frozen=True)
class Written:
    path: str
    action: Literal["created", "changed", "removed", "unchanged"]


def provisioning(
    boards: Sequence[Json], rules: str, *, folder: str, datasource: str, prometheus: str, seen_at: PurePosixPath
) -> dict[str, str]:
    """Returns the files by path. `seen_at` is the path of their folder on Grafana's machine."""
    source = data_source(datasource, prometheus)
    selected = [with_source(board, source["uid"], datasource) for board in boards]
    provider = {
        "name": "serve-app",
        "folder": folder,
        "type": "file",
        "allowUiUpdates": False,
        "options": {"path": str(seen_at / "dashboards")},
    }
    return {
        "provisioning/datasources/serve-app.yaml": _yaml({"apiVersion": 1, "datasources": [source]}),
        "provisioning/dashboards/serve-app.yaml": _yaml({"apiVersion": 1, "providers": [provider]}),
        **{f"dashboards/{board['uid']}.json": f"{json.dumps(board, indent=2)}\n" for board in selected},
        "prometheus/rules.yaml": rules,
    }


def write_files(folder: Path, files: dict[str, str], *, force: bool = False) -> list[Written]:
    """Writes `files` to `folder`, and removes files that serve-app wrote earlier and that are no longer needed.

    Raises CommandError, before it writes anything, if someone else wrote or changed one of the files. With `force`, it
    replaces such files.
    """
    try:
        known: dict[str, str] = _read_manifest(folder)
        digests = {path: _digest(folder / path) for path in (*files, *known)}
        wanted = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
        foreign = [path for path, digest in digests.items() if digest not in (None, known.get(path), wanted.get(path))]
        if foreign and not force:
            raise CommandError(
                f"not written by serve-app, or changed since: {', '.join(str(folder / path) for path in foreign)}; "
                "move it away, or pass --force",
                code="foreign_file",
            )
        written = []
        for path, text in files.items():
            if digests[path] != wanted[path]:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
            action: Literal["created", "changed"] = "created" if digests[path] is None else "changed"
            written.append(Written(path, "unchanged" if digests[path] == wanted[path] else action))
        for path in known.keys() - files.keys():
            (folder / path).unlink(missing_ok=True)
            written.append(Written(path, "removed"))
        if wanted != known:
            (folder / MANIFEST).write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"can't write {error.filename or folder}: {error.strerror}", code="files") from None
    return written


def _read_manifest(folder: Path) -> dict[str, str]:
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        return dict(json.loads(text))
    except ValueError:
        raise CommandError(f"{folder / MANIFEST} is not from serve-app: move it away", code="foreign_file") from None


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _yaml(document: object) -> str:
    return "# Written by `serve-app dashboards provision`.\n" + yaml.safe_dump(document, sort_keys=False)
