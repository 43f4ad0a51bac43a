"""Adds pages to the site (mkdocs.yml): README.md as its home, changes, security, and the help of `serve-app`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    command = [sys.executable, "-m", "typer", "serve_app.cli.__main__", "utils", "docs", "--name", "serve-app"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Examples are indented by two spaces in the help; four make them a code block.
    text = re.sub(r"^  (?=serve-app )", "    ", text.replace("# `serve-app`", "# Command line", 1), flags=re.MULTILINE)
    home = re.sub(r"(\]\(|src=\")docs/", r"\1", (ROOT / "README.md").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8").replace("](docs/", "](")
    for name, page in (("cli.md", text), ("index.md", home), ("CHANGELOG.md", changes), ("SECURITY.md", security)):
        files.append(File.generated(config, name, content=page))
    return files
