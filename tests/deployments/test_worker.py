"""The worker thread: order, errors, cancellation, and an event loop that stays live."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from deployments.worker import Worker, WorkerStuck


async def test_runs_in_one_thread_in_order_while_the_loop_stays_live() -> None:
    worker = Worker("test")
    release = threading.Event()
    seen: list[tuple[int, str]] = []

    def work(number: int) -> int:
        release.wait(10)
        seen.append((number, threading.current_thread().name))
        return number * 2

    tasks = [asyncio.create_task(worker.run(work, number)) for number in range(3)]
    for _ in range(5):  # the loop turns although the thread is blocked
        await asyncio.sleep(0)
    assert worker.num_waiting == 3
    release.set()
    assert await asyncio.gather(*tasks) == [0, 2, 4]
    assert [number for number, _ in seen] == [0, 1, 2]
    assert len({name for _, name in seen}) == 1
    assert worker.num_waiting == 0
    assert worker.busy_seconds == 0.0
    worker.close()


async def test_errors_are_raised_to_their_caller_alone() -> None:
    worker = Worker("test")

    def fail() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        await worker.run(fail)
    assert await worker.run(lambda: 1) == 1
    worker.close()


async def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    worker = Worker("test")
    release = threading.Event()
    ran: list[int] = []
    first = asyncio.create_task(worker.run(release.wait, 10))
    second = asyncio.create_task(worker.run(ran.append, 1))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    await first
    await worker.run(lambda: None)
    assert ran == []
    worker.close()


async def test_a_stuck_call_is_noticed_by_the_check() -> None:
    worker = Worker("Target", stuck_after_seconds=0.0)
    worker.check()
    release = threading.Event()
    task = asyncio.create_task(worker.run(release.wait, 10))
    while worker.busy_seconds == 0.0:
        await asyncio.sleep(0)
    time.sleep(0.001)
    with pytest.raises(WorkerStuck, match="Target has been busy"):
        worker.check()
    release.set()
    await task
    worker.check()
    worker.close()
