"""The commands of a document, section by section."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INLINE: Final = "inline"
SQL: Final = {"SELECT", "ALTER", "CREATE", "GRANT", "REVOKE", "VACUUM", "INSERT", "UPDATE", "DELETE", "DROP"}
#: Code in the text that begins with one of these, and goes on, is a command.
PROGRAMS: Final = SQL | {
    "serve-app", "serve", "python", "make", "git", "openssl", "createdb", "psql", "pg_basebackup", "pg_dump",
    "pg_restore", "kubectl", "ray", "systemctl", "docker",
}  # fmt: skip
_PIECES = re.compile(r"^```(\w*)\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """`text` is as the document has it. `language` is its block's: none for a shell, or `inline`, `sql`, `conf`."""

    section: str
    text: str
    language: str

    @property
    def name(self) -> str:
        """Without variables before it, for comparison."""
        return re.sub(r"^([A-Z_]+=\S+ )+", "", self.text)

    def variants(self) -> list[str]:
        """Without what stands in brackets, then with one bracket after the other: `[--full] [--database URL]`."""
        parts = re.split(r" \[(-.*?)\]", self.text)
        return [
            "".join([parts[0], *(f" {part}" for part in parts[1:count:2]), *parts[2::2]])
            for count in range(1, len(parts) + 1, 2)
        ]


def sections(path: Path) -> dict[str, list[Command]]:
    """By heading, in order. Settings in YAML are no commands."""
    _, *parts = _HEADING.split(path.read_text(encoding="utf-8"))
    return {title: list(_commands(title, text)) for title, text in zip(parts[::2], parts[1::2], strict=True)}


def left_over(
    document: Mapping[str, Sequence[Command]], ran: Iterable[str], listed: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Commands that neither ran nor are listed, and what is listed and not there.

    The beginning of a command that ran is a mention of it: `serve-app models deploy`, `serve-app ledger …`.
    """
    named, began = {command.name for part in document.values() for command in part}, list(ran)
    not_run = {one for one in named if not any(f"{other} ".startswith(one.rstrip(" …") + " ") for other in began)}
    return not_run - set(listed), set(listed) - named


def _commands(section: str, text: str) -> Iterator[Command]:
    for language, block, code in _PIECES.findall(text):
        if code:
            first, _, rest = code.partition(" ")
            if first in PROGRAMS and rest:
                yield Command(section, code, INLINE)
        elif language == "conf":
            yield Command(section, block, language)
        elif language == "sql":
            yield from (Command(section, one.strip(), language) for one in block.split(";") if one.strip())
        elif language in ("", "sh"):
            lines = (line.partition(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines())
            yield from (Command(section, line, language) for line in lines if line)
        else:
            assert language == "yaml", f"{section}: is a block of {language!r} to be run?"
