"""Traces: continued from a caller, begun where there is none, absent when off; and in every log line."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rag_service import tracing
from rag_service.api.envelope import Envelope
from rag_service.config import ConfigError, Settings, TelemetryConfig
from rag_service.traced_app import TracedApp

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
logger = logging.getLogger("rag_service.test")


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    factory = logging.getLogRecordFactory()
    tracing.start_tracing(TelemetryConfig(trace=True), "Gateway", kept)
    yield kept
    tracing.start_tracing(TelemetryConfig(), "Gateway")
    logging.setLogRecordFactory(factory)


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """By name; the request's own, whatever its route, as ``request``."""
    found = exporter.get_finished_spans()
    return {"request" if span.kind is SpanKind.SERVER else span.name: span for span in found}


async def _answer(request: Request) -> JSONResponse:
    logger.warning("at work")
    with tracing.span("inner"):
        return JSONResponse({"trace": getattr(request.state, "trace_id", None)})


async def _broken(request: Request) -> JSONResponse:
    raise KeyError("secret")


def client() -> TestClient:
    paths = {"/v1/documents/{id}": _answer, "/v1/broken": _broken, "/healthz": _answer}
    app = Starlette(routes=[Route(path, endpoint) for path, endpoint in paths.items()])
    app.add_middleware(TracedApp)
    app.add_middleware(Envelope, max_body_bytes=100, max_upload_bytes=100)
    return TestClient(app)


def test_a_callers_trace_is_continued_and_told(exporter: InMemorySpanExporter) -> None:
    reply = client().get("/v1/documents/secret-id", headers={"traceparent": PARENT})
    assert reply.json() == {"trace": TRACE}
    request, inner = spans(exporter)["request"], spans(exporter)["inner"]
    assert request.context is not None
    assert request.parent is not None
    assert inner.parent is not None
    assert request.context.trace_id == int(TRACE, 16)
    assert request.parent.span_id == int("00f067aa0ba902b7", 16)
    assert inner.parent.span_id == request.context.span_id
    assert reply.headers["traceparent"] == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert request.name == "GET /v1/documents/{id}"
    assert "secret-id" not in request.to_json()


@pytest.mark.parametrize("header", [None, "nonsense", f"00-{'0' * 32}-00f067aa0ba902b7-01"])
def test_without_a_valid_one_a_trace_begins_here(exporter: InMemorySpanExporter, header: str | None) -> None:
    reply = client().get("/v1/documents/x", headers={"traceparent": header} if header else {})
    request = spans(exporter)["request"]
    assert request.context is not None
    assert request.parent is None
    assert reply.json() == {"trace": f"{request.context.trace_id:032x}"}
    assert request.attributes is not None
    assert request.attributes["rag.request_id"] == reply.headers["x-request-id"]


def test_a_callers_wish_not_to_be_traced_is_kept(exporter: InMemorySpanExporter) -> None:
    client().get("/v1/documents/x", headers={"traceparent": PARENT[:-1] + "0"})
    assert not spans(exporter)


def test_probes_are_not_traced(exporter: InMemorySpanExporter) -> None:
    client().get("/healthz")
    assert "request" not in spans(exporter)


def test_a_fault_is_marked_without_its_words(exporter: InMemorySpanExporter) -> None:
    assert client().get("/v1/broken").status_code == 500
    request = spans(exporter)["request"]
    assert not request.status.is_ok
    assert request.status.description == "KeyError"
    assert "secret" not in request.to_json()


def test_log_lines_name_the_trace(exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture) -> None:
    client().get("/v1/documents/x", headers={"traceparent": PARENT})
    assert [getattr(record, "trace_id", None) for record in caplog.records if record.msg == "at work"] == [
        TRACE
    ]


def test_stages_timed_elsewhere_stand_one_after_another(exporter: InMemorySpanExporter) -> None:
    with tracing.span("around") as around:
        tracing.past_spans(around, {"embed": 0.25, "index": 0.5}, end_ns=2_000_000_000)
    found = spans(exporter)
    assert (found["embed"].start_time, found["embed"].end_time) == (1_250_000_000, 1_500_000_000)
    assert (found["index"].start_time, found["index"].end_time) == (1_500_000_000, 2_000_000_000)


def test_off_records_nothing_and_hands_an_incoming_trace_through() -> None:
    tracing.start_tracing(TelemetryConfig(), "Gateway")
    reply = client().get("/v1/documents/x", headers={"traceparent": PARENT})
    assert reply.json() == {"trace": TRACE}
    assert reply.headers["traceparent"] == PARENT
    assert client().get("/v1/documents/x").json() == {"trace": None}
    opened = tracing.open_span("x")
    assert not opened.is_recording()
    assert tracing.traceparent_of(opened) is None


def test_an_endpoint_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="trace_endpoint"):
        Settings.load(None, {"telemetry.trace_endpoint": "collector:4318"})
