"""The span around a request of the HTTP face, from its first byte to the last of a stream."""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import Span, SpanKind
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_service import tracing

TRACED = "/v1/"
"""Probes, scrapes and pages are no requests of users."""


class TracedApp:
    """ASGI middleware inside ``Envelope``: continues the caller's trace, or begins one where traces are on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(TRACED):
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        # Envelope takes only a well-formed header for a trace.
        parent = Headers(scope=scope).get("traceparent", "").strip() if "trace_id" in state else None
        attributes = {"http.request.method": scope["method"], "rag.request_id": state.get("request_id", "")}
        with tracing.span("request", parent, attributes, kind=SpanKind.SERVER) as span:
            _tell(state, span)

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _finish(span, scope, message["status"])
                await send(message)

            await self._app(scope, receive, watched)


def _tell(state: dict[str, Any], span: Span) -> None:
    """The trace's id, for the request log and the answer's headers."""
    trace_id = tracing.trace_id_of(span)
    if span.is_recording() and trace_id is not None:
        state["trace_id"] = trace_id
        state.setdefault("headers", {})["traceparent"] = tracing.traceparent_of(span)


def _finish(span: Span, scope: Scope, status: int) -> None:
    route = getattr(scope.get("route"), "path", None)
    if route is not None:  # the template, never the path itself: that may hold a document's id
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        tracing.failed(span, str(status))
