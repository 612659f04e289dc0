"""An answer under way: a task of its own, its events, and the stream that shows them.

The answer's task is cancelled as soon as its client has gone, which ends search, target and draft below it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rag_service.answer import Event
from rag_service.api.events import DONE, HEARTBEAT, ChunkWriter, sse
from rag_service.errors import ApiError, as_api_error
from rag_service.pipeline import Emit


class RunningAnswer:
    """The task that answers a question, and its events in order. Events number no more than tokens."""

    def __init__(self, work: Callable[[Emit], Coroutine[Any, Any, None]]) -> None:
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._ahead: deque[Event | None] = deque()
        self._task = asyncio.create_task(work(self._events.put_nowait))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # looked at here, so that an answer nobody waits for any more warns of nothing
        self._events.put_nowait(None)

    @property
    def task(self) -> asyncio.Task[None]:
        return self._task

    async def next(self) -> Event | None:
        """The next event; None at the end. Raises ``ApiError`` when the answer failed."""
        event = self._ahead.popleft() if self._ahead else await self._events.get()
        if event is None:
            self._ahead.append(None)
            self._raise_failure()
        return event

    async def first(self, wait_seconds: float, grace_seconds: float) -> Event | None:
        """The first event, or None when there is none within ``wait_seconds``.

        Once it is there, ``grace_seconds`` more are given for a refusal (a prompt too long, a full queue), so
        that it can still be told by a status. Raises ``ApiError`` for one.
        """
        try:
            async with asyncio.timeout(wait_seconds):
                event = await self.next()
        except TimeoutError:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                self._ahead.append(await self._events.get())
        if self._ahead and self._ahead[0] is None:
            self._raise_failure()
        return event

    def _raise_failure(self) -> None:
        if self._task.cancelled():
            raise ApiError(503, "The answer was cancelled.", code="cancelled")
        error = self._task.exception()
        if error is not None:
            raise as_api_error(error)

    async def all(self, receive: Receive) -> list[Event]:
        """Every event of the finished answer; cancels it when the client goes before."""
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([self._task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not self._task.done():
                raise ApiError(499, "The client went before the answer was finished.", code="client_closed")
            events: list[Event] = []
            while (event := await self.next()) is not None:
                events.append(event)
            return events
        finally:
            gone.cancel()
            self.cancel()

    def cancel(self) -> None:
        """End whatever still works for this answer."""
        self._task.cancel()


class EventStream(Response):
    """The HTTP answer of a stream. Sources, tokens, annotations, metrics, usage, ``[DONE]``; an error event
    when it fails on the way; a comment whenever nothing was said for ``heartbeat_seconds``."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: RunningAnswer,
        writer: ChunkWriter,
        heartbeat_seconds: float,
        first: Event | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._answer = answer
        self._writer = writer
        self._heartbeat_seconds = heartbeat_seconds
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait([gone, sending], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with contextlib.suppress(OSError):  # the client went while it was written to
                    sending.result()
        finally:
            for task in (gone, sending):
                task.cancel()
            self._answer.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self._first is not None:
            yield self._written(self._first)
        waiting: asyncio.Task[Event | None] | None = None
        try:
            while True:
                waiting = waiting or asyncio.create_task(self._answer.next())
                done, _ = await asyncio.wait([waiting], timeout=self._heartbeat_seconds)
                if not done:
                    yield HEARTBEAT
                    continue
                event = waiting.result()
                waiting = None
                if event is None:
                    break
                yield self._written(event)
        except ApiError as error:
            yield sse(error.body)
            return
        finally:
            if waiting is not None:
                waiting.cancel()
        yield DONE

    def _written(self, event: Event) -> bytes:
        return b"".join(sse(chunk) for chunk in self._writer.chunks(event))


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return
