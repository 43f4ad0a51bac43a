"""Adds the command-line reference to the site, from the help of `serve-app` (mkdocs.yml)."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    command = [sys.executable, "-m", "typer", "serve_app.cli.__main__", "utils", "docs", "--name", "serve-app"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Examples are indented by two spaces in the help; four make them a code block.
    text = re.sub(r"^  (?=serve-app )", "    ", text.replace("# `serve-app`", "# Command line", 1), flags=re.MULTILINE)
    files.append(File.generated(config, "cli.md", content=text))
    return files
