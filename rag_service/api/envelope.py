"""What wraps every request: its id, its size, the headers of its answer, and the last net for a fault.

Plain ASGI, since Starlette's middleware base would stand between a stream and its client.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_service.errors import ApiError, error_response, unexpected

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z")
_TRACEPARENT = re.compile(r"[\da-f]{2}-(?!0{32})([\da-f]{32})-(?!0{16})[\da-f]{16}-[\da-f]{2}\Z")
_OWN_SITE = ("same-origin", "none")


class Envelope:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        max_upload_bytes: int,
        origins: Iterable[str] = (),
        tell_request_id: bool = True,
    ) -> None:
        self._app = app
        self._max_body = max_body_bytes
        self._max_upload = max_upload_bytes
        self._origins = frozenset(origins)
        self._tell_request_id = tell_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        extra = _identify(scope, headers)
        if not self._tell_request_id:
            del extra["x-request-id"]
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(extra)
            await send(message)

        try:
            self._check_origin(scope, headers)
            limited = self._limited(scope, headers, receive)
            await self._app(scope, limited, with_headers)
        except ApiError as error:
            if started:
                raise
            await error_response(error)(scope, receive, with_headers)
        except Exception as fault:
            told = unexpected(fault)
            if not started:
                await error_response(told)(scope, receive, with_headers)

    def _limited(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """``receive`` that ends with a 413 as soon as the body is larger than its route allows."""
        limit = self._max_upload if scope["path"].startswith("/v1/documents") else self._max_body
        error = ApiError(413, f"The request is larger than {limit} bytes.", code="too_large")
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise error
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise error
            return message

        return counted

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuse what a page of another site makes a browser send: without keys nothing else would stop it."""
        origin = headers.get("origin")
        if origin is None or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        if "*" in self._origins or origin in self._origins or "authorization" in headers:
            return
        if headers.get("sec-fetch-site", "") in _OWN_SITE or origin.split("://")[-1] == headers.get("host"):
            return
        raise ApiError(403, "Pages of other sites may not call this service.", code="foreign_origin")


def _identify(scope: Scope, headers: Headers) -> dict[str, str]:
    """Give the request its id and trace; the headers that tell them back."""
    state: dict[str, Any] = scope.setdefault("state", {})
    given = headers.get("x-request-id", "")
    state["request_id"] = given if _REQUEST_ID.match(given) else f"req-{uuid.uuid4().hex}"
    extra = {"x-request-id": state["request_id"], "x-content-type-options": "nosniff"}
    traceparent = headers.get("traceparent", "").strip()
    if match := _TRACEPARENT.match(traceparent):
        state["trace_id"] = match.group(1)
        extra["traceparent"] = traceparent
    state["headers"] = extra
    return extra
