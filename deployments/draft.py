"""The Draft deployment: proposals and look-ahead tables for many targets.

Requests of all targets that arrive within a small window become one batch. Beyond ``max_pending`` waiting
requests the answer is an immediate refusal, never a queue: a late proposal is worth nothing.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from deployments.autoscaling import BUSY_SHARE
from deployments.observed import observe
from deployments.options import deployment_options
from deployments.worker import Worker
from generation.types import DraftRefusal, DraftReply, DraftRequest
from generation.wire import Garbled, decode_requests, encode_replies
from rag_service.config import Settings
from rag_service.draft_choice import load_draft_model

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Sequences stay with the replica that holds their keys: a lane's session id hashes to one replica."""


TOLD_SECONDS = 15.0
"""A target that has said nothing for so long has no answers under way."""


@dataclass(slots=True)
class _Pending:
    requests: list[DraftRequest]
    future: asyncio.Future[list[DraftReply]]


class DraftReplica:
    """Answers bytes with bytes (``generation.wire``)."""

    def __init__(self, settings: Settings) -> None:
        # Here, not above: the process that builds the application imports this module and needs no torch.
        import torch

        from generation.drafters.model import DraftWorker

        observe(settings)
        config = settings.draft
        torch.set_num_threads(max(1, config.draft.num_threads if config.draft else 1))
        self._config = config
        self._replica_id = serve.get_replica_context().replica_tag
        model = load_draft_model(settings)
        engine = settings.engine
        length = (settings.draft.slot_length or engine.slot_tokens) + engine.speculation.scratch_tokens
        num_slots = max(1, config.cache.num_tokens // length)
        self._draft = DraftWorker(
            model,
            num_slots=num_slots,
            slot_length=length,
            support_size=settings.engine.speculation.support_size,
        )
        self._worker = Worker("draft")
        self._pending: list[_Pending] = []
        self._num_pending = 0
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._told: dict[str, tuple[float, dict[str, float]]] = {}
        self._busy_before = (time.monotonic(), 0.0)
        self._counts = {"batches": 0, "requests": 0, "refused": 0, "garbled": 0, "seconds": 0.0}

    async def tables(self, data: bytes) -> tuple[str, bytes]:
        """``(replica id, encoded replies)`` to a batch of encoded requests; garbled bytes get no replies."""
        try:
            requests = decode_requests(data)
        except Garbled:
            self._counts["garbled"] += 1
            return self._replica_id, encode_replies([])
        if self._num_pending + len(requests) > self._config.max_pending:
            self._counts["refused"] += len(requests)
            refused = [DraftRefusal(r.request_id, r.round_id, "overloaded") for r in requests]
            return self._replica_id, encode_replies(refused)
        self._start()
        pending = _Pending(requests, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        self._num_pending += len(requests)
        self._wake.set()
        try:
            return self._replica_id, encode_replies(await pending.future)
        finally:
            self._num_pending -= len(requests)

    async def forget(self, request_ids: list[str]) -> None:
        """Free what finished sequences hold."""
        await self._worker.run(self._draft.forget, request_ids)

    async def status(self) -> dict[str, Any]:
        """Plain JSON about this replica."""
        return {
            "replica": self._replica_id,
            "draft": self._draft.model.name,
            "fingerprint": self._draft.model.fingerprint,
            "sequences": self._draft.num_sequences,
            "evictions": self._draft.num_evictions,
            "pending": self._num_pending,
            "step_seconds": self._draft.step_seconds,
            "pid": os.getpid(),
            **self._counts,
        }

    async def note(self, target: str, told: dict[str, float]) -> None:
        """What a target says of its drafting: ``reply_share`` and ``acceptance_rate``."""
        self._told[target] = (time.monotonic(), told)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler is told: means over the targets heard of lately, and how busy this replica was
        since the last time. See ``deployments.autoscaling``."""
        now = time.monotonic()
        self._told = {name: kept for name, kept in self._told.items() if now - kept[0] < TOLD_SECONDS}
        busy = (self._counts["seconds"] - self._busy_before[1]) / max(1e-3, now - self._busy_before[0])
        self._busy_before = (now, self._counts["seconds"])
        said = [told for _, told in self._told.values()]
        names = {name for told in said for name in told}
        means = {name: statistics.fmean(told[name] for told in said if name in told) for name in names}
        return {BUSY_SHARE: min(1.0, busy), **means}

    async def ready(self) -> dict[str, str]:
        return {}

    async def check_health(self) -> None:
        self._worker.check()

    def _start(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            if self._config.merge_window_seconds > 0:
                await asyncio.sleep(self._config.merge_window_seconds)
            self._wake.clear()
            batch, self._pending = self._pending, []
            while batch:
                batch = await self._answer(batch)

    async def _answer(self, batch: list[_Pending]) -> list[_Pending]:
        """One merged batch; returns what must wait for the next since its sequence is in this one already."""
        taken: list[_Pending] = []
        later: list[_Pending] = []
        ids: set[str] = set()
        for pending in batch:
            own = {request.request_id for request in pending.requests}
            if pending.future.cancelled():
                continue
            if own & ids or len(own) != len(pending.requests):
                later.append(pending)
                if len(own) != len(pending.requests):
                    later.pop()
                    pending.future.set_result([])
                continue
            ids |= own
            taken.append(pending)
        requests = [request for pending in taken for request in pending.requests]
        if not requests:
            return later
        began = time.perf_counter()
        try:
            replies = await self._worker.run(self._draft.answer, requests)
        except Exception as error:
            for pending in taken:
                if not pending.future.done():
                    pending.future.set_exception(error)
            return later
        self._counts["batches"] += 1
        self._counts["requests"] += len(requests)
        self._counts["seconds"] += time.perf_counter() - began
        start = 0
        for pending in taken:
            stop = start + len(pending.requests)
            if not pending.future.done():
                pending.future.set_result(replies[start:stop])
            start = stop
        return later


def build_draft(settings: Settings) -> Application:
    """The Draft deployment, bound."""
    options = deployment_options(settings, "Draft")
    router = RequestRouterConfig(request_router_class=ROUTER)  # type: ignore[arg-type]
    return serve.deployment(**options, request_router_config=router)(DraftReplica).bind(settings)
