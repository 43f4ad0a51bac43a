"""OpenTelemetry spans, built from measurements when a request has ended, and exported in the background.

The names in OpenTelemetry's GenAI conventions may still change. Only `ATTRIBUTES` contains such names.

Tracing is on if OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) is set. Spans wait in a bounded
queue. If the collector is down or hangs, spans are lost but no request is delayed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Value = str | int | float | bool | tuple[str, ...]

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 3.0
NANO: Final = 1e9

#: Attribute names in this project → names in OpenTelemetry's conventions, or with the prefix `serve_app.`.
ATTRIBUTES: Final[Mapping[str, str]] = {
    "operation": "gen_ai.operation.name",
    "door": "http.route",
    "provider": "gen_ai.provider.name",
    "request_id": "gen_ai.response.id",
    "model": "gen_ai.request.model",
    "backend": "gen_ai.response.model",
    "finish": "gen_ai.response.finish_reasons",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "status": "http.response.status_code",
    "code": "error.type",
    "first_token_s": "gen_ai.server.time_to_first_token",
    "per_token_s": "gen_ai.server.time_per_output_token",
    "replica": "serve_app.replica",
    "client_request_id": "serve_app.client_request_id",
    "account": "serve_app.account",
    "price": "serve_app.price",
    "outcome": "serve_app.outcome",
    "reruns": "serve_app.reruns",
}


@dataclass(frozen=True, slots=True)
class SpanData:
    """One span of a trace. Times are Unix seconds. `attributes` are named as in ATTRIBUTES; empty ones are omitted."""

    name: str
    span_id: str
    parent_id: str
    began: float
    ended: float
    kind: Literal["server", "client", "internal"] = "internal"
    attributes: Mapping[str, Value | None] = field(default_factory=dict)
    is_error: bool = False


class SpanExport:
    """Sends spans to the collector that the environment names. `process` is "gateway" or "model"."""

    def __init__(self, process: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME take precedence.
        self._resource = Resource({"service.name": f"serve-app-{process}"}).merge(OTELResourceDetector().detect())
        self._processor = BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S))

    @classmethod
    def of_environment(cls, process: str) -> SpanExport | None:
        """Returns an export, or None if no collector is named."""
        return cls(process) if any(os.environ.get(name) for name in ENDPOINTS) else None

    def add(self, trace_id: str, spans: list[SpanData]) -> None:
        """Queues the spans without waiting."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: str) -> SpanContext:
            return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1))

        for span in spans:
            self._processor.on_end(
                ReadableSpan(
                    name=span.name,
                    context=context(span.span_id),
                    parent=context(span.parent_id) if span.parent_id else None,
                    resource=self._resource,
                    attributes={ATTRIBUTES[k]: v for k, v in span.attributes.items() if v is not None and v != ""},
                    kind=SpanKind[span.kind.upper()],
                    status=Status(StatusCode.ERROR if span.is_error else StatusCode.UNSET),
                    start_time=int(span.began * NANO),
                    end_time=int(span.ended * NANO),
                )
            )

    def close(self) -> None:
        """Sends the queued spans, for at most CLOSE_S. A collector that hangs blocks a thread but not this process."""
        sending = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(CLOSE_S)
