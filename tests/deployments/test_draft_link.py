"""The target's side of the wire against a draft that misbehaves: who is judged, who is waited for.

The handle is a stand-in, so that an answer comes exactly when and as the test says; ``test_draft_faults.py`` does
the same over real Serve.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from deployments.draft_link import ServeDraftLink
from generation.types import NO_PROPOSAL, NOW, DraftRequest, LookaheadTable, SamplingParams
from generation.wire import decode_requests, encode_replies

PATIENCE = 0.1
LONG = 5.0
Answer = Callable[[list[DraftRequest]], Awaitable[bytes]]


class Handle:
    """What ``ServeDraftLink`` uses of a Serve handle."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tables = self.forget = self

    def options(self, **_: Any) -> Handle:
        return self

    async def remote(self, data: Any) -> tuple[str, bytes]:
        return "replica", await self.answer(decode_requests(data)) if isinstance(data, bytes) else b""


async def good(requests: list[DraftRequest]) -> bytes:
    return encode_replies(
        [LookaheadTable(r.request_id, r.round_id, r.confirmed_length, {NOW: NO_PROPOSAL}) for r in requests]
    )


async def another_round(requests: list[DraftRequest]) -> bytes:
    return encode_replies(
        [LookaheadTable(r.request_id, r.round_id + 7, r.confirmed_length, {}) for r in requests]
    )


async def another_length(requests: list[DraftRequest]) -> bytes:
    return encode_replies(
        [LookaheadTable(r.request_id, r.round_id, r.confirmed_length + 1, {}) for r in requests]
    )


async def somebody_else(requests: list[DraftRequest]) -> bytes:
    return encode_replies([LookaheadTable("stranger", r.round_id, r.confirmed_length, {}) for r in requests])


async def twice(requests: list[DraftRequest]) -> bytes:
    return await good([*requests, *requests])


async def never(requests: list[DraftRequest]) -> bytes:
    await asyncio.sleep(60)
    return b""


async def raises(requests: list[DraftRequest]) -> bytes:
    raise RuntimeError("a fault on request")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop

    async def end() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


@pytest.fixture
def handle() -> Handle:
    return Handle(good)


@pytest.fixture
def link(handle: Handle, loop: asyncio.AbstractEventLoop) -> ServeDraftLink:
    link = ServeDraftLink(handle, name="target", vocab_size=100)  # type: ignore[arg-type]
    link.attach(loop)
    return link


def play(link: ServeDraftLink, rounds: range, timeout: float = PATIENCE) -> list[bool]:
    """Ask and wait as the engine does; which rounds got their table."""
    found = []
    for round_id in rounds:
        link.send([DraftRequest("a", round_id, 40 + round_id, (), 5, 8, SamplingParams())])
        found.append("a" in link.receive([("a", round_id)], timeout))
    return found


def opened(link: ServeDraftLink) -> bool:
    return str(link.status()["breakers"]["replica"]) != "closed"


def test_answers_in_time_keep_the_breaker_closed(link: ServeDraftLink) -> None:
    assert all(play(link, range(30), LONG))
    assert not opened(link)
    assert link.status()["late"] == 0


@pytest.mark.parametrize("fault", [another_round, another_length, somebody_else])
def test_tables_nobody_asked_for_are_failures(link: ServeDraftLink, handle: Handle, fault: Answer) -> None:
    play(link, range(2), LONG)
    handle.answer = fault
    assert not any(play(link, range(2, 8), LONG))
    assert opened(link), "an answer that is no answer counts as good"


def test_an_answer_given_twice_counts_once(link: ServeDraftLink, handle: Handle) -> None:
    handle.answer = twice
    assert all(play(link, range(12), LONG))
    assert not opened(link)


def test_a_silent_draft_is_given_up_by_the_rounds_that_waited(link: ServeDraftLink, handle: Handle) -> None:
    play(link, range(2), LONG)
    handle.answer = never
    assert not any(play(link, range(2, 10), 0.02))
    assert opened(link), "the breaker waits for answers that never come"
    assert link.status()["late"] > 0


def test_nobody_waits_for_an_answer_that_has_failed(link: ServeDraftLink, handle: Handle) -> None:
    handle.answer = raises
    began = time.monotonic()
    assert play(link, range(1), 4 * LONG) == [False]
    assert time.monotonic() - began < 2 * LONG


def test_nobody_waits_for_what_the_breaker_withheld(link: ServeDraftLink, handle: Handle) -> None:
    play(link, range(1), LONG)
    link._breakers["replica"].trip()
    began = time.monotonic()
    assert play(link, range(1, 2), 4 * LONG) == [False]
    assert time.monotonic() - began < 2 * LONG
    assert link.status()["withheld"] == 1


def test_nobody_waits_for_a_probe_and_a_good_one_closes_the_breaker(
    link: ServeDraftLink, handle: Handle
) -> None:
    play(link, range(1), LONG)
    handle.answer = never
    link._breakers["replica"].trip()
    assert not link.is_open
    wait_until(lambda: link.is_open)
    began = time.monotonic()
    assert play(link, range(1, 2), 4 * LONG) == [False]
    assert time.monotonic() - began < 2 * LONG
    assert not link.is_open, "one probe at a time"

    link._breakers["replica"].abandon()
    handle.answer = good
    rounds = iter(range(2, 10_000))

    def closed() -> bool:
        number = next(rounds)
        play(link, range(number, number + 1), LONG)
        return not opened(link)

    wait_until(closed)
    assert all(play(link, range(20_000, 20_005), LONG))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it never came to that"
        time.sleep(0.01)
