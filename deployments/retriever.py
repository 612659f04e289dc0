"""Retriever: one index, searches that share their embedding, ingestion jobs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.observed import observe
from deployments.worker import Worker, busy
from rag_service.config import Settings
from rag_service.tracing import past_spans, span
from retrieval.types import (
    Document,
    DocumentInfo,
    JobCounts,
    JobStatus,
    Passage,
    SearchRequest,
    SearchResult,
)

NUM_SEARCH_THREADS = 16
"""Searches under way at once. Queries that wait for the embedder together are embedded in one batch."""


class RetrieverReplica:
    """Holds ``RetrievalService``; every call runs in a thread, so health checks stay live during ingestion.

    Searches and management have threads of their own: a large upload being unpacked delays no search.
    """

    def __init__(self, settings: Settings) -> None:
        # Here, not above: the process that builds the application imports this module and needs no torch.
        from retrieval.service import RetrievalService

        observe(settings)
        self._service = RetrievalService(settings.retrieval, settings.cache_folder, settings.data_folder)
        self._searches = Worker("Retriever", num_threads=NUM_SEARCH_THREADS)
        self._management = Worker("Retriever management", stuck_after_seconds=600.0)

    async def search(self, request: SearchRequest, trace: str | None = None) -> SearchResult:
        with span("retriever", trace) as around:
            result = await self._searches.run(self._service.search, request)
            past_spans(around, {"embed": result.embed_seconds, "index": result.search_seconds})
            return result

    async def ingest(self, documents: Sequence[Document]) -> JobStatus:
        return await self._management.run(self._service.ingest, documents)

    async def ingest_files(
        self, files: Sequence[tuple[str, bytes]], domain: str | None, tenant: str
    ) -> JobStatus:
        return await self._management.run(self._service.ingest_files, files, domain, tenant)

    async def job_counts(self) -> JobCounts:
        return self._service.job_counts()

    async def job(self, job_id: str, tenant: str) -> JobStatus | None:
        return await self._management.run(self._service.job, job_id, tenant)

    async def cancel_job(self, job_id: str, tenant: str) -> JobStatus | None:
        return await self._management.run(self._service.cancel_job, job_id, tenant)

    async def documents(
        self, tenant: str, domain: str | None, limit: int, offset: str | None
    ) -> tuple[list[DocumentInfo], str | None]:
        return await self._management.run(self._service.documents, tenant, domain, limit, offset)

    async def document(self, document_id: str, tenant: str) -> tuple[DocumentInfo, list[Passage]] | None:
        return await self._management.run(self._service.document, document_id, tenant)

    async def delete(self, document_id: str, tenant: str) -> bool:
        return await self._management.run(self._service.delete, document_id, tenant)

    async def ready(self) -> dict[str, str]:
        return await self._searches.run(self._service.ready)

    async def status(self) -> dict[str, Any]:
        """Process id and load, as plain JSON."""
        return {**busy(self._searches), "num_management": self._management.num_waiting}

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        self._searches.check()
        self._management.check()

    def __del__(self) -> None:
        # Serve's hook of a graceful shutdown: finish the document being written, release the index's lock.
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()
