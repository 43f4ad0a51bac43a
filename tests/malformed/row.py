"""One row of the table of malformed bodies: what is sent, and what must come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = "svc-chat"
USER = {"role": "user", "content": "Hi"}


@dataclass(frozen=True)
class Row:
    """`says` are words of the message, `param` is the field that the answer names (None: the body as a whole).

    `status` is 200 for what only looks malformed. With `by_model` the body passes until the model looks at it.
    Large bodies are made when they are needed.
    """

    name: str
    body: bytes | Callable[[], bytes]
    status: int
    param: str | None = None
    says: tuple[str, ...] = ()
    code: str | None = None
    by_model: bool = False

    @property
    def raw(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else self.body()

    @property
    def expected_code(self) -> str:
        return self.code or {400: "invalid_format", 422: "invalid_parameter"}[self.status]


def valid(**more: Any) -> dict[str, Any]:
    """A small body that is served."""
    return {"model": MODEL, "messages": [USER], "max_tokens": 1, **more}


def sent(body: Any) -> bytes:
    """As a client would write it."""
    return json.dumps(body).encode()


def with_text(text: str) -> bytes:
    """The valid body with more members, written as they are."""
    return sent(valid())[:-1] + b", " + text.encode("utf-8", "surrogatepass") + b"}"
