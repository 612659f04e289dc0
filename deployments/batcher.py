"""Merges single items into batches while the worker is busy."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """``await submit(item)``; items that arrive while a batch runs make up the next one.

    Nothing waits for a timer: at low load a batch is one item and costs no delay, under load batches grow by
    themselves up to ``max_batch_size``. ``window_seconds`` above 0 makes an idle batcher linger that long
    for company, worthwhile only where a batch of two costs the same as one (a GPU).

    ``run`` takes the items and returns one result each, in order; an ``Exception`` instance in a result's
    place is raised to that item's caller alone. When ``run`` itself raises on a batch of several, each item
    is run alone, so that one caller's bad input never fails its neighbours.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]],
        max_batch_size: int = 16,
        window_seconds: float = 0.0,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError("max_batch_size must be at least 1.")
        self._run = run
        self._max_batch_size = max_batch_size
        self._window_seconds = window_seconds
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self.num_batches = 0
        self.num_items = 0

    async def submit(self, item: Item) -> Result:
        """The result for one item. A caller that is cancelled leaves the queue."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        try:
            if self._window_seconds > 0:
                await asyncio.sleep(self._window_seconds)
            while self._waiting:
                await self._run_batch(self._next_batch())
        finally:
            self._task = None

    def _next_batch(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        while self._waiting and len(batch) < self._max_batch_size:
            item, future = self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
        return batch

    async def _run_batch(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        if not batch:
            return
        self.num_batches += 1
        self.num_items += len(batch)
        try:
            results = await self._run([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"A batch of {len(batch)} came back with {len(results)} results.")
        except Exception as error:
            if len(batch) == 1:
                _settle(batch[0][1], error)
                return
            for single in batch:
                await self._run_batch([single])
            return
        for (_, future), result in zip(batch, results, strict=True):
            _settle(future, result)


def _settle(future: asyncio.Future[Result], result: Result | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
