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
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, cast

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.breaker import Breaker, Breakers
from generation.drafters.link import Key, ReplyBox
from generation.types import DraftReply, DraftRequest
from generation.wire import Garbled, decode_replies, encode_requests, usable

logger = logging.getLogger(__name__)
SURVEY_SECONDS = 2.0
WAKE_SECONDS = 45.0
"""Longer than Serve looks back for waiting calls (30 s)."""
REPLY_SECONDS = 5.0
"""After this a message counts as lost; the engine stopped waiting long before."""


@dataclass(slots=True)
class _Lane:
    """One session with the draft. ``replica`` is who answered last."""

    session: str
    replica: str = ""
    sequences: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Exchange:
    """One message to a lane and its answer, judged once: by what came, or when the engine gave it up.

    A *probe* asks a replica behind an open breaker. Nobody waits for it, so a silent draft costs no round.
    """

    lane: _Lane
    batch: list[DraftRequest]
    breaker: Breaker
    is_probe: bool
    sent_at: float
    is_judged: bool = False

    def judge(self, num_good: int) -> None:
        if not self.is_judged:
            self.is_judged = True
            self.breaker.record(num_good, len(self.batch) - num_good)

    def answers(self, replies: Seq[DraftReply]) -> list[DraftReply]:
        """Those that answer this message, each sequence once: the right round, the right length."""
        lengths = {(r.request_id, r.round_id): r.confirmed_length for r in self.batch}
        found: dict[Key, DraftReply] = {}
        for reply in replies:
            key = (reply.request_id, reply.round_id)
            length = lengths.get(key)
            if length is not None and getattr(reply, "confirmed_length", length) == length:
                found.setdefault(key, reply)
        return list(found.values())


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
        self._num_missed = 0
        self._waking: asyncio.Task[None] | None = None
        self._asked: dict[str, _Exchange] = {}
        self._deadline = REPLY_SECONDS
        self.counts: Counter[str] = Counter(requests=0, in_time=0, late=0, withheld=0)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.reply_seconds = 0.0

    # -- called by the engine ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """A replica is there and at least one lane's breaker would let a message through."""
        with self._lock:
            self._num_missed += self._num_replicas == 0
            return self._num_replicas > 0 and any(self._breaker(lane).would_allow for lane in self._lanes)

    def send(self, requests: Seq[DraftRequest]) -> None:
        batches: dict[int, tuple[_Lane, list[DraftRequest]]] = {}
        exchanges = []
        with self._lock:
            for request in requests:
                lane = self._lane(request.request_id)
                batches.setdefault(id(lane), (lane, []))[1].append(request)
            for lane, batch in batches.values():
                exchange = self._begin(lane, batch)
                if exchange is not None:
                    exchanges.append(exchange)
        for exchange in exchanges:
            self._box.expect(exchange.batch)
            self._post(self._exchange(exchange))

    def _begin(self, lane: _Lane, batch: list[DraftRequest]) -> _Exchange | None:
        """A message to this lane, or None while its breaker lets none through: then nobody waits either."""
        self.counts["requests"] += len(batch)
        breaker = self._breaker(lane)
        is_probe = breaker.state != "closed"
        if not breaker.allow():
            self.counts["withheld"] += len(batch)
            return None
        exchange = _Exchange(lane, batch, breaker, is_probe, time.monotonic())
        self._asked.update({request.request_id: exchange for request in batch})
        return exchange

    def receive(self, keys: Seq[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        self._deadline = timeout_seconds
        with self._lock:
            asked = {request_id: self._asked.pop(request_id, None) for request_id, _ in keys}
        probes = [key for key in keys if (exchange := asked[key[0]]) is not None and exchange.is_probe]
        waited_for = [key for key in keys if key not in probes]
        replies = self._box.take(waited_for, timeout_seconds) if waited_for else {}
        if probes:
            replies |= self._box.take(probes, 0.0)
        self.counts["in_time"] += len(replies)
        with self._lock:
            for request_id, _ in waited_for:
                exchange = asked[request_id]
                if exchange is not None and request_id not in replies and not exchange.is_judged:
                    self.counts["late"] += len(exchange.batch)
                    exchange.judge(0)
        return replies

    def forget(self, request_ids: Seq[str]) -> None:
        self._box.forget(request_ids)
        with self._lock:
            for request_id in request_ids:
                self._asked.pop(request_id, None)
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

    async def survey(self, tell: Callable[[], dict[str, float]] | None = None) -> None:
        """Learn every few seconds which draft replicas there are, and keep one lane for each.

        While messages go, the replicas are told what ``tell`` says, for their autoscaler. Where there is none and
        the engine asks for one, a call waits for it a while: Serve's autoscaler begins a replica for waiting calls.
        """
        num_told = 0
        while True:
            try:
                await self._count_replicas()
                if tell is not None and self.counts["in_time"] > num_told:
                    num_told = self.counts["in_time"]
                    told = self._handle.broadcast("note", self._name, tell())
                    await told.results_async(timeout_s=SURVEY_SECONDS, return_exceptions=True)
            except DeploymentUnavailableError:
                self._num_replicas = 0
            except Exception:  # a slow survey says nothing: the lanes' breakers judge meanwhile
                logger.debug("the draft could not be surveyed", exc_info=True)
            if self._num_replicas == 0 and self._num_missed and (self._waking is None or self._waking.done()):
                self._num_missed = 0
                self._waking = asyncio.create_task(self._wake())
            await asyncio.sleep(SURVEY_SECONDS)

    async def _wake(self) -> None:
        """A call that waits for a first replica. Where the number is fixed at 0 nobody comes, and it gives up."""
        with contextlib.suppress(Exception):
            handle = self._handle.options(session_id=self._lanes[0].session)
            await asyncio.wait_for(cast(Any, handle.ready.remote()), WAKE_SECONDS)

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

    async def _exchange(self, exchange: _Exchange) -> None:
        lane, batch = exchange.lane, exchange.batch
        data = encode_requests(batch)
        self.bytes_sent += len(data)
        num_good = 0
        try:
            handle = self._handle.options(session_id=lane.session)
            call = cast(Any, handle.tables.remote(data))
            replica, answer = await asyncio.wait_for(call, REPLY_SECONDS)
            num_good = self._take(exchange, replica, answer)
        except Garbled:
            self.counts["garbled"] += len(batch)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # dead, draining, full or slow: all the same to a round
            self.counts[f"failed_{type(error).__name__}"] += 1
        seconds = time.monotonic() - exchange.sent_at
        self.reply_seconds += 0.1 * (seconds - self.reply_seconds)
        with self._lock:
            in_time = not exchange.is_probe or seconds <= self._deadline
            exchange.judge(num_good if in_time else 0)
        self._box.withdraw(batch)

    def _take(self, exchange: _Exchange, replica: str, answer: bytes) -> int:
        """Let in what was asked for, and say how much that was: foreign tables are no answer."""
        lane = exchange.lane
        self.bytes_received += len(answer)
        replies, num_dropped = decode_replies(answer)
        good = [reply for reply in replies if usable(reply, self._vocab_size)]
        self.counts["garbled"] += num_dropped + len(replies) - len(good)
        if replica != lane.replica:
            if lane.replica:
                self.counts["failovers"] += 1
            lane.replica = replica
        answers = exchange.answers(good)
        self.counts["foreign"] += len(good) - len(answers)
        self._box.put(answers)
        return len(answers)

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

    def _breaker(self, lane: _Lane) -> Breaker:
        return self._breakers[lane.replica or lane.session]

    def status(self) -> dict[str, Any]:
        """Plain JSON: lanes, breakers, counts and sizes."""
        with self._lock:
            return {
                "replicas": self._num_replicas,
                "lanes": {lane.session: lane.replica for lane in self._lanes},
                "breakers": dict(self._breakers.states()),
                "dropped": self._box.num_dropped + self.counts["foreign"],
                "bytes_sent": self.bytes_sent,
                "bytes_received": self.bytes_received,
                "reply_seconds": self.reply_seconds,
                **self.counts,
            }
