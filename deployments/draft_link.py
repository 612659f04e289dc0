"""The target's side of the wire: a ``DraftLink`` over a Serve handle.

The engine calls from its worker thread and never waits beyond its deadline; messages travel in the replica's
event loop. Sequences live on *lanes*: a lane is a session id that the consistent-hash router maps to one draft
replica, so a sequence stays with the replica that holds its keys, and each lane sends one message a round.
When a replica goes, its lanes land on another, which answers ``PrefixMissing`` and is sent the ids again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, cast

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.breaker import Breakers
from generation.drafters.link import Key, ReplyBox
from generation.types import DraftReply, DraftRequest
from generation.wire import Garbled, decode_replies, encode_requests, usable

logger = logging.getLogger(__name__)
SURVEY_SECONDS = 2.0
REPLY_SECONDS = 5.0
"""After this a message counts as lost; the engine stopped waiting long before."""


@dataclass(slots=True)
class _Lane:
    """One session with the draft. ``replica`` is who answered last."""

    session: str
    replica: str = ""
    sequences: set[str] = field(default_factory=set)


class ServeDraftLink:
    """See the module. Methods of ``DraftLink`` are called by the worker thread, coroutines by the loop."""

    is_remote = True

    def __init__(self, handle: DeploymentHandle[Any], *, name: str, vocab_size: int) -> None:
        self._handle = handle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._name = name
        self._vocab_size = vocab_size
        self._box = ReplyBox()
        self._breakers = Breakers()
        self._lock = threading.Lock()
        self._lanes = [_Lane(f"{name}/0")]
        self._lane_of: dict[str, _Lane] = {}
        self._num_replicas = 1
        self._sent: dict[Key, tuple[float, int]] = {}
        self.counts: Counter[str] = Counter()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.reply_seconds = 0.0

    # -- called by the engine ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """A replica is there and at least one lane's breaker is not firmly open."""
        with self._lock:
            return self._num_replicas > 0 and any(self._state(lane) != "open" for lane in self._lanes)

    def send(self, requests: Seq[DraftRequest]) -> None:
        self._box.expect(requests)
        batches: dict[int, tuple[_Lane, list[DraftRequest]]] = {}
        with self._lock:
            for request in requests:
                lane = self._lane(request.request_id)
                batches.setdefault(id(lane), (lane, []))[1].append(request)
        for lane, batch in batches.values():
            self.counts["requests"] += len(batch)
            breaker = self._breakers[lane.replica or lane.session]
            if not breaker.allow():
                self.counts["withheld"] += len(batch)
                continue
            self._post(self._exchange(lane, batch))

    def receive(self, keys: Seq[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        replies = self._box.take(keys, timeout_seconds)
        self.counts["in_time"] += len(replies)
        self.counts["late"] += len(keys) - len(replies)
        return replies

    def forget(self, request_ids: Seq[str]) -> None:
        self._box.forget(request_ids)
        with self._lock:
            for request_id in request_ids:
                lane = self._lane_of.pop(request_id, None)
                if lane is not None:
                    lane.sequences.discard(request_id)
                    self._post(self._forget(lane, [request_id]))

    def _post(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if self._loop is None or self._loop.is_closed():
            coroutine.close()
            return
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # -- in the event loop ------------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send from ``loop`` from now on."""
        self._loop = loop

    async def survey(self) -> None:
        """Learn every few seconds which draft replicas there are, and keep one lane for each."""
        while True:
            try:
                await self._count_replicas()
            except DeploymentUnavailableError:
                self._num_replicas = 0
            except Exception:  # a slow survey says nothing: the lanes' breakers judge meanwhile
                logger.debug("the draft could not be surveyed", exc_info=True)
            await asyncio.sleep(SURVEY_SECONDS)

    async def _count_replicas(self) -> None:
        response = self._handle.broadcast("status")
        found = await response.results_async(timeout_s=SURVEY_SECONDS, return_exceptions=True)
        alive = [status["replica"] for status in found if isinstance(status, dict)]
        with self._lock:
            self._num_replicas = len(alive)
            if alive:
                self._breakers.keep([*alive, *(lane.session for lane in self._lanes)])
                self._fit_lanes(alive)

    def _fit_lanes(self, alive: list[str]) -> None:
        """One lane a replica: a lane that shares a replica with an earlier one tries another session id."""
        taken: set[str] = set()
        for lane in self._lanes:
            if lane.replica in taken and not lane.sequences:
                lane.session, lane.replica = f"{lane.session}+", ""
            taken.add(lane.replica)
        while len(self._lanes) < len(alive):
            self._lanes.append(_Lane(f"{self._name}/{len(self._lanes)}"))
        while len(self._lanes) > max(1, len(alive)) and not self._lanes[-1].sequences:
            self._lanes.pop()

    async def _exchange(self, lane: _Lane, batch: list[DraftRequest]) -> None:
        key = lane.replica or lane.session
        began = time.monotonic()
        data = encode_requests(batch)
        self.bytes_sent += len(data)
        num_good = 0
        try:
            handle = self._handle.options(session_id=lane.session)
            call = cast(Any, handle.tables.remote(data))
            replica, answer = await asyncio.wait_for(call, REPLY_SECONDS)
            num_good = self._take(lane, replica, answer)
        except Garbled:
            self.counts["garbled"] += len(batch)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # dead, draining, full or slow: all the same to a round
            self.counts[f"failed_{type(error).__name__}"] += 1
        seconds = time.monotonic() - began
        self.reply_seconds += 0.1 * (seconds - self.reply_seconds)
        self._breakers[key].record(num_good, len(batch) - num_good)

    def _take(self, lane: _Lane, replica: str, answer: bytes) -> int:
        self.bytes_received += len(answer)
        replies, num_dropped = decode_replies(answer)
        good = [reply for reply in replies if usable(reply, self._vocab_size)]
        self.counts["garbled"] += num_dropped + len(replies) - len(good)
        if replica != lane.replica:
            if lane.replica:
                self.counts["failovers"] += 1
            lane.replica = replica
        self._box.put(good)
        return len(good)

    async def _forget(self, lane: _Lane, request_ids: list[str]) -> None:
        with contextlib.suppress(Exception):
            await cast(Any, self._handle.options(session_id=lane.session).forget.remote(request_ids))

    # -- parts ------------------------------------------------------------------------------------------

    def _lane(self, request_id: str) -> _Lane:
        lane = self._lane_of.get(request_id)
        if lane is None:
            lane = min(self._lanes, key=lambda candidate: len(candidate.sequences))
            self._lane_of[request_id] = lane
            lane.sequences.add(request_id)
        return lane

    def _state(self, lane: _Lane) -> str:
        return self._breakers[lane.replica or lane.session].state

    def status(self) -> dict[str, Any]:
        """Plain JSON: lanes, breakers, counts and sizes."""
        with self._lock:
            return {
                "replicas": self._num_replicas,
                "lanes": {lane.session: lane.replica for lane in self._lanes},
                "breakers": dict(self._breakers.states()),
                "dropped": self._box.num_dropped,
                "bytes_sent": self.bytes_sent,
                "bytes_received": self.bytes_received,
                "reply_seconds": self.reply_seconds,
                **self.counts,
            }
