"""A stand-in for the Hugging Face hub on a port of this machine: the real one can't be reached by tests.

It has what its client asks for when it fetches a snapshot: a listing by revision, and files by commit, also in parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)


class FakeHub:
    """One model, `name`, whose files are those of `folder`; its revisions are `main`, `v1` and the commit."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.cut_after: int | None = None  # bytes of a file, after which the next connection breaks, once
        self.ranges: list[str] = []  # of the requests for parts
        self.sent = 0  # bytes of files
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                listing, resolved = f"/api/models/{hub.name}/revision/", f"/{hub.name}/resolve/"
                revision, _, file_name = path.removeprefix(resolved).partition("/")
                is_file = path.startswith(resolved) and revision in REVISIONS
                if path.startswith(listing) and path.removeprefix(listing) in REVISIONS:
                    names = sorted(file.name for file in hub.folder.iterdir())
                    about = {"id": hub.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
                    self._send(200, json.dumps(about).encode(), {"content-type": "application/json"})
                elif path == f"/api/models/{hub.name}/tree/{COMMIT}":
                    files_there = sorted(hub.folder.iterdir())
                    tree = [
                        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}
                        for file in files_there
                    ]
                    self._send(200, json.dumps(tree).encode(), {"content-type": "application/json"})
                elif path.startswith(listing):
                    self._send(404, b"", {"x-error-code": "RevisionNotFound"})
                elif is_file and (file := hub.folder / file_name).is_file():
                    self._send_file(file.read_bytes())
                elif is_file:
                    self._send(404, b"", {"x-error-code": "EntryNotFound"})
                else:
                    self._send(404, b"", {"x-error-code": "RepoNotFound"})

            def _send_file(self, content: bytes) -> None:
                about = {"etag": f'"{hashlib.sha256(content).hexdigest()}"', "x-repo-commit": COMMIT}
                status, start = 200, 0
                if part := self.headers.get("range"):
                    hub.ranges.append(part)
                    first, _, last = part.removeprefix("bytes=").partition("-")
                    start, end = int(first), min(int(last or len(content)), len(content) - 1)
                    status, about["content-range"] = 206, f"bytes {start}-{end}/{len(content)}"
                    content = content[: end + 1]
                rest = content[start:]
                if self.command == "GET" and hub.cut_after is not None and len(rest) > hub.cut_after:
                    cut, hub.cut_after = hub.cut_after, None
                    self._send(status, rest[:cut], about | {"content-length": str(len(rest))})
                    self.close_connection = True
                else:
                    self._send(status, rest, about)

            def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {"content-length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)
                    hub.sent += len(body) if "etag" in headers else 0

        return Handler


@contextlib.contextmanager
def served(name: str, folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(name, folder)
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
