"""What the pipeline asks of its neighbours, as protocols.

``deployments.handles`` implements them over Ray Serve handles; tests implement them in process. The pipeline
therefore knows neither Ray nor where a model runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from generation.types import GenerationChunk, GenerationRequest
from rag_service.record import RequestRecord
from retrieval.types import (
    Document,
    DocumentInfo,
    JobStatus,
    Passage,
    ScoredPassage,
    SearchRequest,
    SearchResult,
)


class RetrieverBackend(Protocol):
    """Embedding, search and ingestion. Errors are ``retrieval.types.RetrievalError``."""

    async def search(self, request: SearchRequest) -> SearchResult: ...

    async def ingest(self, documents: Sequence[Document]) -> JobStatus: ...

    async def ingest_files(
        self, files: Sequence[tuple[str, bytes]], domain: str, tenant: str
    ) -> JobStatus: ...

    async def job(self, job_id: str, tenant: str) -> JobStatus | None: ...

    async def cancel_job(self, job_id: str, tenant: str) -> JobStatus | None: ...

    async def documents(
        self, tenant: str, domain: str | None, limit: int, offset: str | None
    ) -> tuple[list[DocumentInfo], str | None]: ...

    async def document(self, document_id: str, tenant: str) -> tuple[DocumentInfo, list[Passage]] | None: ...

    async def delete(self, document_id: str, tenant: str) -> bool: ...

    async def ready(self) -> dict[str, str]:
        """Name → why it is not ready; empty when ready."""
        ...


class RerankerBackend(Protocol):
    """Passages in a better order, best first."""

    async def rerank(self, query: str, passages: Sequence[ScoredPassage]) -> list[ScoredPassage]: ...

    async def ready(self) -> dict[str, str]: ...


class GeneratorBackend(Protocol):
    """The target. Closing the iterator cancels the request. Errors are ``generation.types.GenerationError``."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]: ...

    async def status(self) -> dict[str, Any]:
        """Models, queue, KV use, breakers, controller: plain JSON."""
        ...

    async def ready(self) -> dict[str, str]: ...


class RecorderBackend(Protocol):
    """Where request records go, and what is known of past requests."""

    async def record(self, record: RequestRecord) -> None: ...

    async def acceptance(self, query: dict[str, Any]) -> dict[str, Any]:
        """The report behind ``GET /v1/acceptance``; keys as in design section 6 (``domains`` → figures)."""
        ...

    async def metrics(self) -> str:
        """Prometheus text exposition."""
        ...

    async def ready(self) -> dict[str, str]: ...
