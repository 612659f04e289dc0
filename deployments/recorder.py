"""Recorder: the one replica that counts, keeps the request log and answers for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.observed import observe
from deployments.refusal import Refusal
from deployments.worker import Worker, busy
from rag_service.config import Settings
from rag_service.record import RequestRecord
from rag_service.recorder import Recorder
from rag_service.report_query import ReportQueryError
from rag_service.target_load import TargetLoad
from retrieval.types import JobCounts


class RecorderReplica:
    """Holds ``Recorder``. Recording and scraping have a thread apart from reports, which may read days of
    log: neither waits for one."""

    def __init__(self, settings: Settings) -> None:
        observe(settings)
        self._recorder = Recorder(settings)
        self._records = Worker("Recorder")
        self._reports = Worker("Recorder reports", stuck_after_seconds=600.0)

    async def record_many(self, records: Sequence[RequestRecord]) -> None:
        """Count and log records; one delivered twice counts once."""
        await self._records.run(self._record_all, records)

    async def acceptance(self, query: Mapping[str, Any]) -> dict[str, Any] | Refusal:
        """The report behind ``GET /v1/acceptance``."""
        try:
            return dict(await self._reports.run(self._recorder.acceptance, query))
        except ReportQueryError as error:
            return Refusal(str(error), error.param)
        except OSError as error:
            return Refusal(str(error), None)

    async def metrics(
        self,
        open_by_replica: Mapping[str, bool] | None = None,
        load: TargetLoad | None = None,
        jobs: JobCounts | None = None,
    ) -> str:
        """Prometheus text; ``open_by_replica`` says which draft replicas are not asked at present, ``load`` how
        full the targets are, ``jobs`` how ingestion fares (None: they do not say)."""
        if open_by_replica is not None:
            self._recorder.set_breakers(open_by_replica)
        self._recorder.set_load(load)
        self._recorder.set_jobs(jobs)
        return await self._records.run(self._recorder.metrics)

    async def ready(self) -> dict[str, str]:
        return self._recorder.ready()

    async def status(self) -> dict[str, Any]:
        """Process id and load, as plain JSON."""
        return busy(self._records)

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        self._records.check()

    def _record_all(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            self._recorder.record(record)

    def __del__(self) -> None:
        # Serve's hook of a graceful shutdown: what is still in memory goes to the log.
        recorder = getattr(self, "_recorder", None)
        if recorder is not None:
            recorder.close()
