from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from retrieval.batching import Batcher


def test_calls_that_wait_share_a_batch_and_each_gets_its_own_result() -> None:
    started, release = threading.Event(), threading.Event()
    batches: list[list[int]] = []

    def double(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        started.set()
        release.wait(10)
        return [2 * item for item in items]

    batcher: Batcher[int, int] = Batcher(double, max_batch=8)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(batcher, 0)
        started.wait(10)
        others = [pool.submit(batcher, i) for i in range(1, 8)]
        while len(batcher._waiting) < 7:
            pass
        release.set()
        assert [first.result(10), *(other.result(10) for other in others)] == [2 * i for i in range(8)]
    assert len(batches) == 2


def test_an_error_reaches_every_caller_and_the_next_call_works() -> None:
    def fail_on_negative(items: Sequence[int]) -> list[int]:
        if min(items) < 0:
            raise ValueError("negative")
        return list(items)

    batcher: Batcher[int, int] = Batcher(fail_on_negative, max_batch=4)
    with pytest.raises(ValueError, match="negative"):
        batcher(-1)
    assert batcher(3) == 3
