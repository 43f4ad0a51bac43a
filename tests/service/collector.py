"""A collector of traces: an OTLP receiver over HTTP, with OpenTelemetry's own messages. It stands for any backend."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Span:
    """As it was received. Ids are hexadecimal digits, times nanoseconds of Unix time."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    is_error: bool
    attributes: dict[str, Any]


class Collector:
    """Keeps what it gets. A context manager."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.bodies.append(body)
                collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans(message: Any) -> list[Span]:
    return [
        Span(
            {one.key: one.value.string_value for one in group.resource.attributes}["service.name"],
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.status.code == 2,
            {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
        )
        for group in message.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]
