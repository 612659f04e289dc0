"""The Target deployment: it owns the decoding loop, the cache and the handle to Draft.

The engine lives in one worker thread, which steps while there is work; the event loop only passes requests in
and chunks out, so health checks, cancellation and streaming stay live during a long prefill.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deployments.answer_span import AnswerSpan
from deployments.autoscaling import ACCEPTANCE, KV_USE, QUEUED_TOKENS, REPLY_SHARE
from deployments.draft_link import ServeDraftLink
from deployments.observed import observe
from deployments.options import deployment_options
from generation.types import GenerationChunk, GenerationError, GenerationRequest
from rag_service.config import Settings
from rag_service.draft_choice import choose_draft, load_colocated, resolved

logger = logging.getLogger(__name__)
STUCK_SECONDS = 120.0
"""A step that runs longer hangs (a kernel that never returns): Serve then replaces the replica."""
Command = Callable[[], None]


class TargetReplica:
    """Generates for the gateways. See ``rag_service.backends.GeneratorBackend``."""

    def __init__(self, settings: Settings, draft: DeploymentHandle[Any] | None = None) -> None:
        # Here, not above: the process that builds the application imports this module and needs no torch.
        import torch

        from generation.engine import Engine
        from generation.loading import load_model, load_tokenizer

        observe(settings)
        config = settings.engine
        torch.set_num_threads(max(1, config.target.num_threads))
        self._settings = settings
        model_config = resolved(config.target, settings)
        tokenizer = load_tokenizer(model_config.model, model_config.revision)
        target = load_model(model_config)
        choice = choose_draft(settings, target)
        for warning in choice.warnings:
            logger.warning("%s", warning)
        self._choice = choice
        self._link: ServeDraftLink | None = None
        if draft is not None and choice.allowed:
            name = serve.get_replica_context().replica_tag
            self._link = ServeDraftLink(draft, name=name, vocab_size=target.vocab_size)
        colocated = load_colocated(settings) if choice.allowed and choice.colocated else None
        self._engine = Engine(target, tokenizer, config, colocated=colocated, remote=self._link)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[GenerationChunk]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._survey: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._stepping_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- the event loop -------------------------------------------------------------------------------

    async def generate(
        self, request: GenerationRequest, trace: str | None = None
    ) -> AsyncIterator[GenerationChunk]:
        """Chunks of one answer; closing the iterator cancels the request within one round."""
        self._attach()
        if self._failure is not None:
            raise GenerationError(self._failure, "unavailable")
        chunks: asyncio.Queue[GenerationChunk] = asyncio.Queue()
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commands.put(lambda: self._add(request, chunks, accepted))
        finished, span = False, AnswerSpan(trace, request)
        try:
            await accepted
            while not finished:
                chunk = await chunks.get()
                span.see(chunk)
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            span.end()
            if not finished:
                self._commands.put(lambda: self._cancel(request.request_id))

    async def status(self) -> dict[str, Any]:
        """Models, queue, cache, controller and breakers of this replica."""
        self._attach()
        engine, proposer = self._engine, self._engine.proposer
        cache = engine.prefix_cache
        controller = proposer.controller
        return {
            "replica": serve.get_replica_context().replica_tag,
            "pid": os.getpid(),
            "target": engine.target.name,
            "target_fingerprint": engine.target.fingerprint,
            "draft": self._choice.name,
            "draft_fingerprint": self._choice.fingerprint,
            "warnings": list(self._choice.warnings),
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "queued_tokens": self._num_queued_tokens(),
            "kv": {
                "slots": engine.runner.pool.num_slots,
                "free_slots": engine.runner.pool.num_free,
                "slot_length": engine.runner.pool.slot_length,
                "prefix_hit_tokens": cache.num_hit_tokens if cache else 0,
                "prefix_queried_tokens": cache.num_queried_tokens if cache else 0,
            },
            "step_seconds": engine.step_seconds,
            "lookahead": {
                "hits": proposer.lookahead_hits,
                "misses": proposer.lookahead_misses,
                "branch_budget": proposer.budget.branches,
                "alpha": proposer.outcomes.alpha,
            },
            "controller": controller.status(),
            "link": self._link.status() if self._link is not None else None,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler is told. See ``deployments.autoscaling``."""
        pool = self._engine.runner.pool
        used = 1.0 - pool.num_free / pool.num_slots
        return {QUEUED_TOKENS: float(self._num_queued_tokens()), KV_USE: used}

    def _num_queued_tokens(self) -> int:
        waiting = list(self._engine.scheduler.waiting)
        return sum(one.num_remaining + len(one.token_ids) - one.num_computed for one in waiting)

    def _tell_draft(self) -> dict[str, float]:
        """How drafting goes, as this target sees it; the draft's autoscaler follows it."""
        assert self._link is not None
        share = self._link.reply_seconds / self._engine.step_seconds
        return {REPLY_SHARE: share, ACCEPTANCE: float(self._engine.proposer.controller.status()["alpha"])}

    async def ready(self) -> dict[str, str]:
        """Empty when requests can be taken."""
        self._attach()
        return {} if self._failure is None else {"target": self._failure}

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises: the engine's thread has died."""
        if not self._thread.is_alive():
            raise RuntimeError(self._failure or "the engine's thread has ended")
        stuck = time.monotonic() - self._stepping_since if self._stepping_since is not None else 0.0
        if stuck > STUCK_SECONDS:
            raise RuntimeError(f"one step of the engine has run for {stuck:.0f} seconds")

    def _attach(self) -> None:
        """Bind to the loop that serves requests, and begin to survey the draft."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._link is not None:
                self._link.attach(self._loop)
                self._survey = asyncio.create_task(self._link.survey(self._tell_draft))

    # -- the engine's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._engine
        while True:
            try:
                command = self._commands.get(block=not engine.has_work, timeout=None)
                if command is None:
                    return
                command()
                continue
            except queue.Empty:
                pass
            self._stepping_since = time.monotonic()
            try:
                for chunk in engine.step():
                    self._deliver(chunk)
            except Exception:
                logger.exception("a step of the engine failed; its requests end with an error")
                self._fail_all()
            self._stepping_since = None

    def _add(
        self,
        request: GenerationRequest,
        chunks: asyncio.Queue[GenerationChunk],
        accepted: asyncio.Future[None],
    ) -> None:
        assert self._loop is not None
        try:
            self._engine.add(request)
        except Exception as error:
            self._loop.call_soon_threadsafe(_settle, accepted, error)
            return
        self._streams[request.request_id] = chunks
        self._loop.call_soon_threadsafe(_settle, accepted, None)

    def _cancel(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def _deliver(self, chunk: GenerationChunk) -> None:
        stream = self._streams.get(chunk.request_id)
        if chunk.finish_reason is not None:
            self._streams.pop(chunk.request_id, None)
        if stream is not None and self._loop is not None:
            # A closed loop means that the replica is going down: nobody listens any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(stream.put_nowait, chunk)

    def _fail_all(self) -> None:
        """A step broke beyond one request: end what runs with an error and go on with a clean engine."""
        for request_id in list(self._streams):
            chunk = self._engine.fail(request_id, "The target failed on this batch; ask again.")
            if chunk is not None:
                self._deliver(chunk)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def build_target(settings: Settings, draft: Application | None) -> Application:
    """The Target deployment, bound to the draft if there is one."""
    options = deployment_options(settings, "Target")
    return serve.deployment(**options)(TargetReplica).bind(settings, draft)
