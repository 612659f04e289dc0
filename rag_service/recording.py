"""Request records on their way to the Recorder: made of what is known of a request, however it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from rag_service.answer import Progress
from rag_service.backends import GeneratorBackend, RecorderBackend
from rag_service.config import OTHER_DOMAIN, Settings
from rag_service.errors import ApiError
from rag_service.figures import merged_stats
from rag_service.question import Question
from rag_service.record import RequestRecord

logger = logging.getLogger(__name__)
NAMES_SECONDS = 30.0
"""How long the target's word on which models it runs is taken for true."""


class Recording:
    """Hands records over beside the requests: a recorder that fails costs a line in the log, no request."""

    def __init__(self, settings: Settings, recorder: RecorderBackend, generator: GeneratorBackend) -> None:
        self._settings = settings
        self._recorder = recorder
        self._generator = generator
        self._under_way: set[asyncio.Task[None]] = set()
        draft = settings.draft.draft
        self._names = {"target": settings.engine.target.model, "draft": draft.model if draft else ""}
        self._asked_at = float("-inf")

    def answered(self, question: Question, progress: Progress, outcome: str, code: str | None) -> None:
        """Record a request that came as far as the pipeline."""
        keep = self._settings.telemetry.keep_text
        ends = progress.last_chunks.values()
        domain = progress.domain or question.domain or OTHER_DOMAIN
        self._record(
            RequestRecord(
                request_id=question.request_id,
                started_at=progress.started_at,
                domain=domain if domain in self._settings.service.domains else OTHER_DOMAIN,
                tenant=question.tenant,
                outcome=outcome,
                total_seconds=progress.elapsed(),
                stage_seconds=dict(progress.stage_seconds),
                time_to_first_token_seconds=progress.first_token_seconds,
                num_prompt_tokens=progress.num_prompt_tokens,
                num_cached_tokens=progress.num_cached_tokens,
                num_generated_tokens=progress.num_generated_tokens,
                temperature=question.sampling.temperature,
                stats=merged_stats(chunk.stats for chunk in ends if chunk.stats is not None),
                mode=question.mode or self._settings.engine.speculation.mode,
                stream=question.stream,
                error_code=code,
                question=question.text if keep else None,
                answer="\n".join(text for _, text in sorted(progress.text.items())) if keep else None,
                trace_id=question.trace_id,
            )
        )

    def refused(
        self, request_id: str, error: ApiError, tenant: str = "default", domain: str | None = None
    ) -> None:
        """Record a request that never came as far as a search."""
        self._record(
            RequestRecord(
                request_id=request_id,
                started_at=time.time(),
                domain=domain or OTHER_DOMAIN,
                tenant=tenant,
                outcome=error.outcome,
                total_seconds=0.0,
                error_code=error.code,
            )
        )

    def _record(self, record: RequestRecord) -> None:
        task = asyncio.ensure_future(self._deliver(record))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _deliver(self, record: RequestRecord) -> None:
        await self._ask_names()
        try:
            await self._recorder.record(
                replace(record, target=self._names["target"], draft=self._names["draft"])
            )
        except Exception:
            logger.exception("The record of request %s was not taken.", record.request_id)

    async def _ask_names(self) -> None:
        """Which models really run, of the target: a packaged draft is named nowhere in the settings."""
        now = time.monotonic()
        if now - self._asked_at < NAMES_SECONDS:
            return
        self._asked_at = now
        try:
            status = await self._generator.status()
        except Exception as error:
            logger.warning("The target does not say which models it runs (%s).", type(error).__name__)
            return
        for part in self._names:
            self._names[part] = _revision(status, part) or self._names[part]


def _revision(status: dict[str, Any], part: str) -> str:
    """``name@fingerprint``, so that reports tell two drafts of one name apart."""
    name, fingerprint = str(status.get(part) or ""), str(status.get(f"{part}_fingerprint") or "")
    return f"{name}@{fingerprint[:8]}" if name and fingerprint else name
