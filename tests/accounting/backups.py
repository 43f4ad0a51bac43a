"""Makes backups, restores them, and changes what they say."""

from __future__ import annotations

import json
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

from serve_app.accounting import backup, restore
from serve_app.accounting.backup_file import Manifest

from .books import NOON, patient_database


def back_up(url: str, file: Path) -> Manifest:
    with closing(patient_database(url)) as database, file.open("wb") as opened:
        return backup.back_up(database, opened, file.parent, lambda _: None)


def restored(file: Path, url: str) -> restore.Restored:
    return restore.restore(file, url, NOON, lambda _: None)


def change_manifest(file: Path, **changes: Any) -> None:
    with zipfile.ZipFile(file) as archive:
        said = json.loads(archive.read("manifest.json"))
        copy = archive.read(said["copy"])
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(said["copy"], copy)
        archive.writestr("manifest.json", json.dumps(said | changes))
