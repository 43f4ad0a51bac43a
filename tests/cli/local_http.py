"""A small real HTTP server on a real port, for stand-ins. It records requests; `next` plans faults."""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


class Drop:
    """Closes the connection without a response; with `after_work` it handles the request first."""

    def __init__(self, *, after_work: bool = False) -> None:
        self.after_work = after_work


class Hang:
    """Sends no response until `release` is set; `reached` is set when the request has arrived."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()


class LocalServer:
    """Subclasses answer requests in `handle`. Use as a context manager."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.next: deque[Answer | Drop | Hang | None] = deque()  # None: as usual
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                server._serve(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 (the names that http.server calls)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def handle(self, request: Request) -> Answer:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def _serve(self, connection: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(connection.path)
        content = connection.rfile.read(int(connection.headers.get("content-length") or 0))
        request = Request(
            connection.command,
            parts.path,
            dict(parse_qsl(parts.query)),
            {name.lower(): value for name, value in connection.headers.items()},
            json.loads(content) if content else None,
        )
        self.requests.append(request)
        planned = self.next.popleft() if self.next else None
        if isinstance(planned, Drop):
            if planned.after_work:
                self.handle(request)
            connection.close_connection = True
            return
        if isinstance(planned, Hang):
            planned.reached.set()
            planned.release.wait(300)
            connection.close_connection = True
            return
        answer = planned or self.handle(request)
        is_text = isinstance(answer.body, str)
        content = answer.body.encode() if is_text else json.dumps(answer.body).encode()
        connection.send_response(answer.status)
        headers = {"content-type": "text/html" if is_text else "application/json", **answer.headers}
        for name, value in {**headers, "content-length": str(len(content))}.items():
            connection.send_header(name, value)
        connection.end_headers()
        connection.wfile.write(content)
