"""An OpenTelemetry collector for tests: takes OTLP over HTTP, as the real ones do, and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """One span as it came over the wire; ids in hexadecimal digits."""

    name: str
    deployment: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    num_events: int
    attributes: Mapping[str, Any]


class SpanCollector:
    """Listens on a free port of this machine until ``close``."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def of_trace(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in list(self._spans) if span.trace_id == trace_id]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
            for scope in group.scope_spans:
                for span in scope.spans:
                    self._spans.append(
                        CollectedSpan(
                            span.name,
                            resource.get("rag.deployment", ""),
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            len(span.events),
                            {
                                pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "int_value")
                                for pair in span.attributes
                            },
                        )
                    )
