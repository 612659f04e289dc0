"""Calls of several threads, worked off together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Calls that arrive while a batch runs form the next one: no waiting window, a lone call loses nothing.

    The thread that finds nobody working becomes the worker for all that wait, then hands over.
    """

    def __init__(self, function: Callable[[Sequence[Item]], Sequence[Result]], max_batch: int) -> None:
        """``function`` maps a batch to results in the same order; an error it raises reaches each caller."""
        self._function = function
        self._max_batch = max_batch
        self._waiting: list[tuple[Item, Future[Result]]] = []
        self._lock = threading.Lock()
        self._running = threading.Lock()

    def __call__(self, item: Item) -> Result:
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.append((item, future))
        while not future.done():
            with self._running:
                if not future.done():
                    self._run_one_batch()
        return future.result()

    def _run_one_batch(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        try:
            results = self._function([item for item, _ in batch])
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
