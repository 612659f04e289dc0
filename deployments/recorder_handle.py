"""The Recorder's handle: records are delivered beside the answers, never in their way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from ray.serve.handle import DeploymentHandle

from deployments.handles import NUM_ATTEMPTS, call, described, generation_error, ready_of
from deployments.refusal import Refusal
from generation.types import GenerationError
from rag_service.record import RequestRecord
from rag_service.report_query import ReportQueryError
from rag_service.target_load import TargetLoad, target_load
from rag_service.target_status import targets_of
from retrieval.types import JobCounts

BATCH_RECORDS = 256
STATUS_SECONDS = 1.0

logger = logging.getLogger(__name__)


class RecorderHandle:
    """``RecorderBackend`` over the Recorder deployment.

    A record never fails or delays an answer: while the Recorder is away records wait here, the newest
    ``max_waiting`` of them, and are delivered in order when it is back.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        status: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
        job_counts: Callable[[], Awaitable[JobCounts | None]] | None = None,
        max_waiting: int = 10_000,
    ) -> None:
        """``status``: the target's, whose breakers are shown with the metrics; ``job_counts``: the retriever's."""
        self._handle = handle
        self._status = status
        self._job_counts = job_counts
        self._waiting: deque[RequestRecord] = deque(maxlen=max_waiting)
        self._task: asyncio.Task[None] | None = None
        self.num_dropped = 0

    async def record(self, record: RequestRecord) -> None:
        """Hand over one record; returns once delivered, or after a second at most."""
        if len(self._waiting) == self._waiting.maxlen:
            self.num_dropped += 1
            logger.error("the recorder has been away for too long: oldest request record dropped")
        self._waiting.append(record)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._deliver())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._task), timeout=1.0)

    async def _deliver(self) -> None:
        num_failures = 0
        while self._waiting:
            batch = list(self._waiting)[:BATCH_RECORDS]
            try:
                await call(self._handle, "record_many", batch, seconds=10.0)
            except Exception as error:
                num_failures += 1
                message, code = described(error, "recorder")
                logger.warning("%d request records wait: %s", len(self._waiting), message)
                if code != "internal_error" or num_failures < NUM_ATTEMPTS:
                    await asyncio.sleep(min(0.1 * 2**num_failures, 5.0))
                    continue
                # The recorder is there and cannot take these: they must not hold up all that follow.
                self.num_dropped += len(batch)
                logger.error("%d request records dropped", len(batch))
            num_failures = 0
            # By identity: the oldest may have been dropped from the left meanwhile.
            done = {id(record) for record in batch}
            while self._waiting and id(self._waiting[0]) in done:
                self._waiting.popleft()

    async def acceptance(self, query: dict[str, Any]) -> dict[str, Any]:
        answer = await self._read("acceptance", query)
        if not isinstance(answer, Refusal):
            return cast("dict[str, Any]", answer)
        if answer.param is not None:
            raise ReportQueryError(answer.message, answer.param)
        raise GenerationError(answer.message, "unavailable")

    async def metrics(self) -> str:
        (breakers, load), jobs = await asyncio.gather(self._target_figures(), self._ingestion_figures())
        return str(await self._read("metrics", breakers, load, jobs))

    async def ready(self) -> dict[str, str]:
        return await ready_of(self._handle, "recorder")

    async def _target_figures(self) -> tuple[dict[str, bool] | None, TargetLoad | None]:
        """Draft replica → whether it is not asked at present, and the load; None when the target does not say."""
        if self._status is None:
            return None, None
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                status = await self._status()
                return open_breakers(status), target_load(status)
        except Exception:
            return None, None

    async def _ingestion_figures(self) -> JobCounts | None:
        if self._job_counts is None:
            return None
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                return await self._job_counts()
        except TimeoutError:
            return None

    async def _read(self, method: str, *args: Any) -> Any:
        try:
            return await call(self._handle, method, *args)
        except Exception as error:
            raise generation_error(error, "recorder") from None


def open_breakers(status: Mapping[str, Any]) -> dict[str, bool]:
    """From the target's status (``link.breakers``: draft replica → state, in each of ``replicas`` where there
    are several): is any target not asking that draft replica?"""
    found: dict[str, bool] = {}
    for target in targets_of(status):
        breakers = (target.get("link") or {}).get("breakers") or {}
        for draft, state in breakers.items():
            found[draft] = found.get(draft, False) or state != "closed"
    return found
