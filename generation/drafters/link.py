"""How the engine talks to a draft, wherever it runs: send now, receive later, never wait beyond a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from generation.types import DraftReply, DraftRequest

if TYPE_CHECKING:  # the target's side of a remote draft runs without torch
    from generation.drafters.model import DraftWorker

Key = tuple[str, int]
"""(request id, round id): what a reply answers."""


class DraftLink(Protocol):
    """One message each way a round, for all sequences of a batch. Implementations never raise."""

    @property
    def is_remote(self) -> bool:
        """Drafting runs beside the target's forward pass, so look-ahead can hide it."""
        ...

    @property
    def is_open(self) -> bool:
        """Some draft may be asked now; False while absent or behind an open breaker."""
        ...

    def send(self, requests: Seq[DraftRequest]) -> None:
        """Hand requests over without waiting."""
        ...

    def receive(self, keys: Seq[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        """Replies by request id, at the latest after the timeout; late and foreign ones are dropped."""
        ...

    def forget(self, request_ids: Seq[str]) -> None:
        """The sequences are finished; the draft may free what it holds."""
        ...


class ReplyBox:
    """Where replies wait for their round. Only an awaited (request, round, length) is let in."""

    def __init__(self) -> None:
        self._awaited: dict[str, tuple[int, int]] = {}
        self._replies: dict[str, DraftReply] = {}
        self._changed = threading.Condition()
        self.num_dropped = 0

    def expect(self, requests: Seq[DraftRequest]) -> None:
        with self._changed:
            for request in requests:
                self._awaited[request.request_id] = (request.round_id, request.confirmed_length)
                self._replies.pop(request.request_id, None)

    def put(self, replies: Seq[DraftReply]) -> None:
        """Take what is awaited; late, duplicate and foreign replies are counted and dropped."""
        with self._changed:
            for reply in replies:
                awaited = self._awaited.get(reply.request_id)
                length = getattr(reply, "confirmed_length", awaited[1] if awaited else None)
                if awaited != (reply.round_id, length) or reply.request_id in self._replies:
                    self.num_dropped += 1
                    continue
                self._replies[reply.request_id] = reply
            self._changed.notify_all()

    def take(self, keys: Seq[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        """Replies by request id; waits only for what may still come."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            wanted = {request_id for request_id, round_id in keys if self._round(request_id) == round_id}
            while any(self._round(i) is not None and i not in self._replies for i in wanted):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            taken = {}
            for request_id in wanted & self._replies.keys():
                taken[request_id] = self._replies.pop(request_id)
                self._awaited.pop(request_id, None)
            return taken

    def withdraw(self, requests: Seq[DraftRequest]) -> None:
        """Nothing more comes for these: whoever waits for them need not."""
        with self._changed:
            for request in requests:
                unanswered = request.request_id not in self._replies
                if unanswered and self._round(request.request_id) == request.round_id:
                    del self._awaited[request.request_id]
            self._changed.notify_all()

    def _round(self, request_id: str) -> int | None:
        awaited = self._awaited.get(request_id)
        return None if awaited is None else awaited[0]

    def forget(self, request_ids: Seq[str]) -> None:
        with self._changed:
            for request_id in request_ids:
                self._awaited.pop(request_id, None)
                self._replies.pop(request_id, None)


class LocalLink:
    """A draft in this process: computed when received (``colocated``), on the caller's own thread."""

    is_remote = False
    is_open = True

    def __init__(self, worker: DraftWorker) -> None:
        self.worker = worker
        self._pending: dict[str, DraftRequest] = {}

    def send(self, requests: Seq[DraftRequest]) -> None:
        self._pending.update({request.request_id: request for request in requests})

    def receive(self, keys: Seq[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        batch = [
            self._pending.pop(request_id)
            for request_id, round_id in keys
            if request_id in self._pending and self._pending[request_id].round_id == round_id
        ]
        return {reply.request_id: reply for reply in self.worker.answer(batch)} if batch else {}

    def forget(self, request_ids: Seq[str]) -> None:
        for request_id in request_ids:
            self._pending.pop(request_id, None)
        self.worker.forget(request_ids)


class ThreadLink:
    """A draft in a thread of this process: look-ahead on a second core without Ray, for benchmarks and tests."""

    is_remote = True
    is_open = True

    def __init__(self, worker: DraftWorker) -> None:
        self.worker = worker
        self._box = ReplyBox()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._last: Future[None] | None = None

    def send(self, requests: Seq[DraftRequest]) -> None:
        batch = list(requests)
        self._box.expect(batch)
        self._last = self._thread.submit(lambda: self._box.put(self.worker.answer(batch)))

    def receive(self, keys: Seq[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        return self._box.take(keys, timeout_seconds)

    def forget(self, request_ids: Seq[str]) -> None:
        ids = list(request_ids)
        self._box.forget(ids)
        self._thread.submit(self.worker.forget, ids)

    def close(self) -> None:
        self._thread.shutdown()
