"""Around Serve's HTTP proxy: a request whose gateway dies is asked again, or told so in the API's own shape.

Serve's proxy drops a request that its gateway replica takes along: a plain-text 500, or a stream that breaks
off. As ASGI middleware inside the proxy's process this module

- sends a request that nothing of an answer was passed on for to another gateway, if repeating it is harmless,
- otherwise answers 503 ``replica_lost``, or ends a stream with an event that says so,
- gives the proxy's own refusals (too many requests, no gateway) OpenAI's shape and a ``Retry-After``.

Serve finds it by ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``, in the environment of Ray's processes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_service.api.events import sse
from rag_service.errors import ApiError, error_response

NUM_ATTEMPTS: Final = 4
WAIT_SECONDS: Final = 0.2
MAX_KEPT_BYTES: Final = 4 * 2**20
"""A larger body is not kept, so its request is not repeated; questions are far below."""
REPEATABLE: Final = frozenset({"/v1/chat/completions", "/v1/search"})
"""POSTs that change nothing. An upload is left to its sender, who knows whether its job was begun."""
SERVES_OWN: Final = "/-/"
"""Paths that the proxy answers itself, for probes: these stay as they are."""
REFUSALS: Final = {
    408: ApiError(408, "The request was not done within its deadline.", code="deadline_exceeded"),
    429: ApiError(
        429,
        "Too many requests wait already; try again later.",
        code="overloaded",
        headers={"Retry-After": "1"},
    ),
    503: ApiError(
        503,
        "No gateway can take this request now; ask again.",
        code="unavailable",
        headers={"Retry-After": "1"},
    ),
}
LOST: Final = ApiError(
    503,
    "The gateway replica that worked on this request stopped; ask again.",
    code="replica_lost",
    headers={"Retry-After": "1"},
)

logger = logging.getLogger("ray.serve")


def repeating() -> list[Middleware]:
    """What Serve's variable names where a request that has not begun to be answered may be begun again."""
    return [Middleware(LostGateway, repeat=True)]


def telling() -> list[Middleware]:
    """The same without repeating anything but reads (``gateway.retry_unstarted`` off)."""
    return [Middleware(LostGateway, repeat=False)]


class LostGateway:
    """ASGI middleware between the HTTP server and Serve's proxy, which returns without an answer when a gateway is
    lost."""

    def __init__(self, app: ASGIApp, repeat: bool = True) -> None:
        self._app = app
        self._repeat = repeat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(SERVES_OWN):
            await self._app(scope, receive, send)
            return
        question, answer = _Question(receive), _Answer(scope, receive, send)
        for attempt in range(1, NUM_ATTEMPTS + 1):
            # Serve writes into the scope: its path must be the client's again, the request id Serve's first one.
            tried = dict(scope)
            await self._app(tried, question.reader(), answer.send)
            scope["headers"] = tried["headers"]
            if answer.ended or question.gone:
                return
            if answer.started or attempt == NUM_ATTEMPTS or not (self._may_repeat(scope) and question.kept):
                break
            logger.warning("gateway lost before it answered %s; asked again", scope["path"])
            await asyncio.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
        await answer.lost()

    def _may_repeat(self, scope: Scope) -> bool:
        if scope["method"] in ("GET", "HEAD"):
            return True
        return self._repeat and scope["method"] == "POST" and scope["path"] in REPEATABLE


class _Question:
    """What the client sends, kept so that it can be read again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._num_bytes = 0
        self.gone = False

    @property
    def kept(self) -> bool:
        return self._num_bytes <= MAX_KEPT_BYTES

    def reader(self) -> Receive:
        """``receive`` from the beginning."""
        position = 0

        async def read() -> Message:
            nonlocal position
            if position < len(self._messages):
                position += 1
                return self._messages[position - 1]
            message = await self._receive()
            self.gone = self.gone or message["type"] == "http.disconnect"
            self._num_bytes += len(message.get("body", b""))
            if self.kept:
                self._messages.append(message)
                position += 1
            else:
                self._messages.clear()
            return message

        return read


class _Answer:
    """What goes back to the client: passed on as it comes, but the proxy's own refusals."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_stream = False
        self._refused = False
        self.started = False
        self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
            return
        self.ended = self.ended or not message.get("more_body", False)
        if not self._refused:
            await self._send(message)

    async def _start(self, message: Message) -> None:
        self.started = True
        headers = Headers(raw=message["headers"])
        kind = headers.get("content-type", "")
        refusal = REFUSALS.get(message["status"])
        # Gateways say JSON, whatever they refuse.
        if refusal is not None and kind.startswith("text/plain"):
            self._refused = True
            await self._tell(refusal, headers.get("retry-after"))
            return
        self._is_stream = kind.startswith("text/event-stream")
        await self._send(message)

    async def lost(self) -> None:
        """Nothing more comes: say so, as far as it can still be said."""
        if not self.started:
            await self._tell(LOST)
        elif self._is_stream:
            await self._send({"type": "http.response.body", "body": sse(LOST.body), "more_body": False})

    async def _tell(self, error: ApiError, retry_after: str | None = None) -> None:
        response = error_response(error)
        headers = MutableHeaders(raw=response.raw_headers)
        if retry_after is not None:
            headers["retry-after"] = retry_after
        if request_id := Headers(scope=self._scope).get("x-request-id"):
            headers["x-request-id"] = request_id
        response.raw_headers = headers.raw
        await response(self._scope, self._receive, self._send)
