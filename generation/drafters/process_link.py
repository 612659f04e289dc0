"""A draft in a process of its own on this machine, over a pipe: look-ahead on a second core without Ray.

The bytes are those of the wire between replicas (``generation.wire``), so scripts and benchmarks exercise what
the service sends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from multiprocessing.connection import Connection

from generation.drafters.link import Key, ReplyBox
from generation.drafters.model import DraftWorker
from generation.types import DraftReply, DraftRequest
from generation.wire import (
    Garbled,
    decode_replies,
    decode_requests,
    encode_replies,
    encode_requests,
    usable,
)

_FORGET = b"F"
_ASK = b"A"
_START_SECONDS = 120.0


class ProcessLink:
    """``DraftLink`` to a child process. ``make_worker`` runs there and must be importable."""

    is_remote = True

    def __init__(
        self, make_worker: Callable[[], DraftWorker], core: int | None = None, vocab_size: int = 1 << 31
    ) -> None:
        """``core``: pin the child to this processor; ``vocab_size``: the target's.

        Raises ``RuntimeError`` if the draft does not start.
        """
        context = multiprocessing.get_context("spawn")
        self._vocab_size = vocab_size
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, make_worker, core), daemon=True)
        self._process.start()
        child.close()
        if not self._connection.poll(_START_SECONDS) or self._connection.recv_bytes() != b"ready":
            raise RuntimeError("The draft process did not start.")
        self._box = ReplyBox()
        self._listener = threading.Thread(target=self._listen, name="draft-replies", daemon=True)
        self._listener.start()

    @property
    def is_open(self) -> bool:
        return self._process.is_alive()

    def send(self, requests: Seq[DraftRequest]) -> None:
        self._box.expect(requests)
        with contextlib.suppress(OSError):
            self._connection.send_bytes(_ASK + encode_requests(requests))

    def receive(self, keys: Seq[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        return self._box.take(keys, timeout_seconds)

    def forget(self, request_ids: Seq[str]) -> None:
        self._box.forget(request_ids)
        with contextlib.suppress(OSError):
            self._connection.send_bytes(_FORGET + "\n".join(request_ids).encode())

    def close(self) -> None:
        """End the child."""
        self._connection.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()

    def _listen(self) -> None:
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            with contextlib.suppress(Garbled):
                replies, _ = decode_replies(data)
                self._box.put([reply for reply in replies if usable(reply, self._vocab_size)])


def _serve(connection: Connection, make_worker: Callable[[], DraftWorker], core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    worker = make_worker()
    connection.send_bytes(b"ready")
    while True:
        try:
            data = connection.recv_bytes()
            if data[:1] == _FORGET:
                worker.forget(data[1:].decode().split("\n"))
            else:
                connection.send_bytes(encode_replies(worker.answer(decode_requests(data[1:]))))
        except (EOFError, OSError):
            return
