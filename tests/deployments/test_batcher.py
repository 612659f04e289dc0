"""Merging items into batches: sizes, errors, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from deployments.batcher import Batcher


class Doubling:
    """Doubles numbers, one batch at a time; raises on 13 and answers 7 by an exception of its own."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, items: list[int]) -> Sequence[int | Exception]:
        self.batches.append(items)
        await self.gate.wait()
        if 13 in items:
            raise ValueError("13 is refused")
        return [KeyError("7") if item == 7 else 2 * item for item in items]


async def test_items_that_arrive_during_a_batch_make_up_the_next() -> None:
    run = Doubling()
    run.gate.clear()
    batcher = Batcher(run, max_batch_size=4)
    first = asyncio.create_task(batcher.submit(1))
    while not run.batches:
        await asyncio.sleep(0)
    rest = [asyncio.create_task(batcher.submit(number)) for number in range(2, 8 - 1)]
    await asyncio.sleep(0)
    run.gate.set()
    assert await first == 2
    assert await asyncio.gather(*rest) == [4, 6, 8, 10, 12]
    assert run.batches == [[1], [2, 3, 4, 5], [6]]
    assert (batcher.num_batches, batcher.num_items) == (3, 6)


async def test_one_bad_item_fails_alone() -> None:
    run = Doubling()
    batcher = Batcher(run)
    results = await asyncio.gather(*(batcher.submit(number) for number in (1, 13, 2)), return_exceptions=True)
    assert results[0] == 2
    assert isinstance(results[1], ValueError)
    assert results[2] == 4
    assert run.batches == [[1, 13, 2], [1], [13], [2]]


async def test_an_exception_in_a_results_place_is_that_callers() -> None:
    batcher = Batcher(Doubling())
    results = await asyncio.gather(*(batcher.submit(number) for number in (6, 7)), return_exceptions=True)
    assert results[0] == 12
    assert isinstance(results[1], KeyError)


async def test_a_cancelled_caller_leaves_the_queue() -> None:
    run = Doubling()
    run.gate.clear()
    batcher = Batcher(run)
    first = asyncio.create_task(batcher.submit(1))
    while not run.batches:
        await asyncio.sleep(0)
    gone, stays = (asyncio.create_task(batcher.submit(number)) for number in (2, 3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    run.gate.set()
    assert await stays == 6
    assert await first == 2
    assert gone.cancelled()
    assert run.batches == [[1], [3]]


async def test_a_wrong_number_of_results_is_an_error_not_a_mix_up() -> None:
    async def short(items: list[int]) -> list[int]:
        return [2 * item for item in items[1:]]

    with pytest.raises(RuntimeError, match="1 came back with 0"):
        await Batcher(short).submit(1)


async def test_a_window_waits_for_company() -> None:
    run = Doubling()
    batcher = Batcher(run, window_seconds=0.01)
    first = asyncio.create_task(batcher.submit(1))
    await asyncio.sleep(0)
    assert await batcher.submit(2) == 4
    assert await first == 2
    assert run.batches == [[1, 2]]


async def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Batcher(Doubling(), max_batch_size=0)
