"""A document that people write and programs renew in part: each program owns the text between its two marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Draw = Callable[[Path], Mapping[str, str]]  # writes pictures into a folder; name -> what it shows


def check(text: str, begin: str, end: str) -> None:
    """Raises ValueError when `text` has no place between these marks."""
    _, there, rest = text.partition(begin)
    if not there or end not in rest:
        raise ValueError(f"the document has no place for results: the lines {begin!r} and {end!r} are missing")


def renewed(text: str, begin: str, end: str, content: str) -> str:
    """`text` with `content` between the marks; everything else stays. Raises ValueError."""
    check(text, begin, end)
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n\n{content}\n{end}{after}"


def renew(path: Path, begin: str, end: str, records: tuple[str, Any], draw: Draw, write: Callable[[str], str]) -> None:
    """Renews one program's part of a file. Pictures and records go into the folder of the same name.

    `records` is a file name and what it holds; `write` returns the content for the Markdown of the pictures.

    Raises:
        ValueError: the document has no marks; nothing is written.
    """
    text = path.read_text()
    check(text, begin, end)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    name, values = records
    (folder / name).write_text(json.dumps(values, separators=(",", ":")) + "\n")
    pictures = "\n\n".join(f"![{alt}]({folder.name}/{file})" for file, alt in draw(folder).items())
    path.write_text(renewed(text, begin, end, write(pictures)))
