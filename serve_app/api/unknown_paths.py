"""The 404 of a path that the service does not have, with the path that the client probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from serve_app.api import errors
from serve_app.api.doors import DOORS
from serve_app.api.errors import ApiError

_TEXT_ONLY: Final = "the models of this service only write text. Send this request to a service for"
#: Endings of paths that SDKs call and that no backend can serve.
_NOT_SERVED: Final[Mapping[str, str]] = {
    "/embeddings": f"{_TEXT_ONLY} embeddings",
    "/rerank": f"{_TEXT_ONLY} ranking",
    "/images/generations": f"{_TEXT_ONLY} images",
    "/audio/speech": f"{_TEXT_ONLY} speech",
    "/audio/transcriptions": f"{_TEXT_ONLY} speech",
    "/moderations": f"{_TEXT_ONLY} moderation",
}


def unknown_path(method: str, path: str, methods: Mapping[str, Sequence[str]]) -> ApiError:
    """Returns the error for a path that does not exist, with the nearest paths that do.

    `methods` has the methods of each path, without `/v1`.
    """
    found = f"there is no {method} {path if len(path) <= 60 else path[:57] + '...'}"
    name = path.rstrip("/").removeprefix("/v1")
    if (why := next((why for ending, why in _NOT_SERVED.items() if name.endswith(ending)), None)) is not None:
        return errors.not_found(f"{found}: {why}")
    # SDKs append a path to the base URL. So if the base URL is wrong, the address still ends with a path that exists.
    ends = max((one for one in methods if name.endswith(one)), key=len, default=None)
    if ends is not None:
        nearest = [ends]
    else:
        nearest = get_close_matches(name, methods, 1, 0.75) or [*(door.path for door in DOORS), "/models"]
    use = ", ".join(f"{'|'.join(methods[one])} /v1{one}" for one in nearest)
    hint = "" if ends in (None, name) else ". Check the base URL: it must end with the host, or with a single /v1"
    return errors.not_found(f"{found}: use {use}{hint}. GET /docs describes all paths")
