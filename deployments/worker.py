"""A thread for a replica's blocking work, so that its event loop never waits for a model."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerStuck(RuntimeError):
    """The worker has been inside one call for longer than it may."""


class Worker:
    """Runs blocking functions one after another in a thread of its own.

    One thread by default: models are not to be entered twice at once, and two forward passes on one core
    only slow each other down. ``num_threads`` above 1 is for functions that are safe to overlap and merge
    their forward passes themselves, or wait for a server.
    """

    def __init__(self, name: str, stuck_after_seconds: float = 120.0, num_threads: int = 1) -> None:
        self._name = name
        self._stuck_after_seconds = stuck_after_seconds
        self._executor = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=name)
        self._started_at: dict[int, float] = {}
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Calls not finished yet, the running one included."""
        return self._num_waiting

    @property
    def busy_seconds(self) -> float:
        """How long the oldest running call has been running; 0 when idle."""
        started = list(self._started_at.values())
        return time.monotonic() - min(started) if started else 0.0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in the thread and await its result; its exceptions are raised here.

        Cancelling the awaiting task drops a call that has not begun; one that has runs to its end, its result
        unused, because a thread cannot be interrupted.
        """

        def call() -> T:
            thread = threading.get_ident()
            self._started_at[thread] = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                del self._started_at[thread]

        self._num_waiting += 1
        try:
            return await asyncio.wrap_future(self._executor.submit(call))
        finally:
            self._num_waiting -= 1

    def check(self) -> None:
        """Raise ``WorkerStuck`` when the running call is overdue: Serve then replaces the replica.

        This is what notices a GPU kernel that never returns; the event loop alone would still look healthy.
        """
        busy = self.busy_seconds
        if busy > self._stuck_after_seconds:
            raise WorkerStuck(f"{self._name} has been busy with one call for {busy:.0f} seconds.")

    def close(self) -> None:
        """Drop calls that have not begun and let the thread end; does not wait."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def busy(worker: Worker) -> dict[str, Any]:
    """What a replica's status says of its worker: process, calls not finished, seconds in the oldest one."""
    return {"pid": os.getpid(), "num_waiting": worker.num_waiting, "busy_seconds": worker.busy_seconds}
