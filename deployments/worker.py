"""One thread for a replica's blocking work, so that its event loop never waits for a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerStuck(RuntimeError):
    """The worker has been inside one call for longer than it may."""


class Worker:
    """Runs blocking functions one after another in a thread of its own.

    One thread, not a pool: torch models and the embedded Qdrant are not to be entered twice at once, and two
    forward passes on one core only slow each other down.
    """

    def __init__(self, name: str, stuck_after_seconds: float = 120.0) -> None:
        self._name = name
        self._stuck_after_seconds = stuck_after_seconds
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._started_at: float | None = None
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        """Calls not finished yet, the running one included."""
        return self._num_waiting

    @property
    def busy_seconds(self) -> float:
        """How long the running call has been running; 0 when idle."""
        started_at = self._started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in the thread and await its result; its exceptions are raised here.

        Cancelling the awaiting task drops a call that has not begun; one that has runs to its end, its result
        unused, because a thread cannot be interrupted.
        """

        def call() -> T:
            self._started_at = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self._started_at = None

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
