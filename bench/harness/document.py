"""Updates the generated parts of a document. Each program owns the text between its two marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Draw = Callable[[Path], Mapping[str, str]]  # writes pictures into a folder; returns captions by file name


def check(text: str, begin: str, end: str) -> None:
    """Raises ValueError unless `text` has both marks."""
    _, there, rest = text.partition(begin)
    if not there or end not in rest:
        raise ValueError(f"the document needs the lines {begin!r} and {end!r}, in this order")


def renewed(text: str, begin: str, end: str, content: str) -> str:
    """Returns `text` with `content` between the marks. Raises ValueError if a mark is missing."""
    check(text, begin, end)
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n\n{content}\n{end}{after}"


def renew(path: Path, begin: str, end: str, records: tuple[str, Any], draw: Draw, write: Callable[[str], str]) -> None:
    """Updates one program's part of a document. Pictures and records go into the folder with the document's name.

    `records` is the name and content of a JSON file. `write` returns the new part, given the Markdown of the pictures.

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
