"""OpenTelemetry spans of a request, from the gateway into the replicas and back.

Off by default: then the tracer is OpenTelemetry's own that does nothing, which still hands an incoming trace id
through, so that logs can name it. One tracer a process, since a replica is one. Spans carry figures and ids, never
text. A context travels between processes as a ``traceparent`` (W3C Trace Context).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
)
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from rag_service.config import TelemetryConfig

EXPORT_SECONDS = 5.0
"""One delivery to the collector may take so long; it has a thread of its own, and no request waits for it."""

_PROPAGATOR = TraceContextTextMapPropagator()
_OFF: Tracer = trace.NoOpTracer()
_tracer: Tracer = _OFF


def start_tracing(config: TelemetryConfig, part: str, exporter: SpanExporter | None = None) -> None:
    """Trace in this process from now on as ``config`` says; ``part``: the deployment, told with each span.

    Also has every line logged within a trace say its ``trace_id``. ``exporter`` replaces the configured one, and
    gets each span at its end.
    """
    global _tracer
    logging.setLogRecordFactory(_record_with_trace_id)
    if not config.trace:
        _tracer = _OFF
        return
    resource = Resource.create({"service.name": "rag-service", "rag.deployment": part})
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(config.trace_sample)))
    if exporter is not None or config.trace_exporter == "console":
        provider.add_span_processor(SimpleSpanProcessor(exporter or ConsoleSpanExporter()))
    else:
        provider.add_span_processor(BatchSpanProcessor(_otlp(config.trace_endpoint)))
    _tracer = provider.get_tracer("rag_service")


def open_span(
    name: str,
    parent: str | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    start_ns: int | None = None,
) -> Span:
    """A span that whoever asked must end. It becomes nobody's surroundings, so it may outlive a ``yield``.

    ``parent``: a ``traceparent``; None: the span that surrounds the caller. ``start_ns``: since the epoch.
    """
    return _tracer.start_span(
        name, _context(parent), kind=kind, attributes=dict(attributes or {}), start_time=start_ns
    )


@contextmanager
def span(
    name: str,
    parent: str | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Iterator[Span]:
    """A span around a block; an exception marks it as failed and goes on."""
    opened = open_span(name, parent, attributes, kind=kind)
    with trace.use_span(opened, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield opened
        except BaseException as error:
            failed(opened, type(error).__name__)
            raise


def past_spans(parent: Span, seconds: Mapping[str, float], *, end_ns: int | None = None) -> None:
    """Children of ``parent`` for stages that were timed elsewhere: one after another, the last ending now."""
    if not parent.is_recording():
        return
    around = trace.set_span_in_context(parent)
    ends = end_ns if end_ns is not None else time.time_ns()
    at = ends - int(sum(seconds.values()) * 1e9)
    for name, duration in seconds.items():
        child = _tracer.start_span(name, around, start_time=at)
        at += int(duration * 1e9)
        child.end(at)


def failed(opened: Span, reason: str) -> None:
    """Mark a span as failed. ``reason``: a code or a class, no text of a user."""
    opened.set_status(Status(StatusCode.ERROR, reason))


def traceparent_of(opened: Span | None = None) -> str | None:
    """What to send along so that others continue ``opened``; None: the span around the caller. None without
    a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(opened) if opened is not None else None)
    return carrier.get("traceparent")


def trace_id_of(opened: Span) -> str | None:
    """32 hexadecimal digits; None without a trace."""
    context = opened.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else None


def _context(traceparent: str | None) -> Context | None:
    # An empty context of its own, so that a header that is none does not fall back to what surrounds us.
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context()) if traceparent else None


def _otlp(endpoint: str | None) -> SpanExporter:
    # Here, not above: it loads a client that only those who trace need.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)


def _record_with_trace_id(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = logging.LogRecord(*args, **kwargs)
    trace_id = trace_id_of(trace.get_current_span())
    if trace_id is not None:
        record.trace_id = trace_id
    return record
