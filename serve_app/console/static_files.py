"""The files of the pages: style, scripts, icons. Browsers cache each file under a URL that contains its version."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fastapi.responses import Response

from serve_app.console.web import TEMPLATES, Refused, Visit
from serve_app.gateway.front import brand_style

FOLDER: Final = Path(__file__).parent / "static"
FOREVER: Final = "public, max-age=31536000, immutable"
UNVERSIONED: Final = "no-cache"  # scripts import each other without a version
MIN_COMPRESSED: Final = 1024
mimetypes.add_type("font/woff2", ".woff2")  # not every system knows this type
BRAND: Final = "brand.css"
LOGO: Final = "logo"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file's content, as it is and compressed, with its media type and its version."""

    content: bytes
    media_type: str
    version: str
    compressed: bytes | None

    @classmethod
    def of(cls, content: bytes, name: str) -> StaticFile:
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        # Font files are already compressed.
        is_compressed = len(content) >= MIN_COMPRESSED and not media_type.startswith("font/")
        compressed = gzip.compress(content, 9, mtime=0) if is_compressed else None
        return cls(content, media_type, hashlib.sha256(content).hexdigest()[:12], compressed)


@cache
def _paths() -> dict[str, Path]:
    return {path.name: path for folder in (FOLDER, FOLDER / "vendor") for path in folder.iterdir() if path.is_file()}


@cache
def file_named(name: str) -> StaticFile | None:
    path = _paths().get(name)
    return None if path is None else StaticFile.of(path.read_bytes(), name)


def address(name: str) -> str:
    """Returns the path of a file below the console's root, with its version."""
    found = file_named(name)
    if found is None:
        raise LookupError(f"the console has no file {name}")
    return f"/static/{name}?v={found.version}"


async def send(visit: Visit) -> Response:
    """Sends one of the files, or the brand's style sheet or logo."""
    name, brand = visit.request.path_params["name"], visit.console.brand
    if name == BRAND:
        found: StaticFile | None = StaticFile.of(brand_style(brand.accent).encode(), BRAND)
    elif name == LOGO and brand.logo is not None:
        found = StaticFile.of(brand.logo.read_bytes(), brand.logo.name)
    else:
        found = file_named(name) if name in _paths() else None
    if found is None:
        raise Refused(404, "There is no such file.")
    request, etag = visit.request, f'"{found.version}"'
    headers = {"cache-control": FOREVER if request.query_params.get("v") == found.version else UNVERSIONED}
    headers |= {"etag": etag, "vary": "accept-encoding"}
    if request.headers.get("if-none-match", "").removeprefix("W/") == etag:
        return Response(status_code=304, headers=headers)
    content = found.content
    if found.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = found.compressed, "gzip"
    return Response(content, headers=headers, media_type=found.media_type)


TEMPLATES.filters["static"] = address
