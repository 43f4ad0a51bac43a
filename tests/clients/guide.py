"""The examples and settings of docs/quick-start.md and docs/clients.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOST, KEY = "http://127.0.0.1:8000", "YOUR_KEY"


@dataclass(frozen=True)
class Example:
    client: str
    language: str
    code: str

    def with_service(self, url: str, key: str) -> str:
        """Returns the code with the address (without `/v1`) and the key of a service."""
        return self.code.replace(HOST, url).replace(KEY, key)


def examples() -> list[Example]:
    """Returns all examples in the pages' order. `client` is the heading of the section."""
    found, client = [], ""
    text = "".join((ROOT / "docs" / name).read_text() for name in ("quick-start.md", "clients.md"))
    for heading, language, code in re.findall(r"^###? ([^\n]+)$|^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        client = heading or client
        if code:
            found.append(Example(client, language, code))
    return found


def settings_of(client: str, language: str) -> Example:
    """Returns the only example of a client in a language."""
    [example] = [found for found in examples() if (found.client, found.language) == (client, language)]
    return example
