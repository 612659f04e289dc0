"""Retrieval as one object: what a Retriever replica, the CLI and the tests hold."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path

from retrieval.chunk_encoder import ChunkEncoder
from retrieval.chunking import Chunker
from retrieval.collection import open_collections, stored_documents
from retrieval.config import RetrievalConfig, SearchMode
from retrieval.embedder import SentenceEmbedder
from retrieval.index.record import Index
from retrieval.ingestion import Ingestion, Progress
from retrieval.jobs import Jobs
from retrieval.reranker import LateInteractionReranker, Ranker, load_ranker, load_reranker
from retrieval.retriever import Retriever
from retrieval.sparse import Bm25Encoder
from retrieval.types import (
    Document,
    DocumentInfo,
    JobCounts,
    JobStatus,
    Passage,
    Reranker,
    SearchRequest,
    SearchResult,
)


class RetrievalService:
    """Search and ingestion over one index. Every method may be called from any thread and blocks it.

    Raises ``RetrievalError`` when a model can't be loaded or the index can't be opened.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        cache_folder: Path | None,
        data_folder: Path,
        ranker: Ranker | None = None,
    ) -> None:
        """``cache_folder``: where packaged models lie (``models/NAME``); ``data_folder``: index and jobs;
        ``ranker``: instead of the one that ``config`` names."""
        self.config = config
        self._cache_folder = cache_folder
        self._embedder = SentenceEmbedder(config.embedder, cache_folder)
        self._chunker = Chunker(config.chunking, self._embedder.tokenizer)
        self._sparse = Bm25Encoder()
        self._ranker = ranker
        if config.reranker.kind == "late_interaction" and ranker is None:
            self._ranker = load_ranker(config.reranker, self._embedder, config.embedder.model)
        self._collections = open_collections(config.index, data_folder)
        self._name = f"{config.index.collection}-{self._fingerprint()}"
        self._index: Index = self._collections.open(self._name, self._embedder.dimension)
        self.ingestion = Ingestion(
            self._chunker,
            ChunkEncoder(self._embedder, self._sparse, self._ranker),
            self._index,
            optimize_every=config.index.optimize_every,
        )
        self._retriever = self.retriever()
        self._jobs = Jobs(data_folder / "jobs", config.ingestion, lambda: self.ingestion)
        self._closed = threading.Event()
        self._rebuilding: str | None = None
        self._rebuilder = self._start_rebuild()

    @property
    def index(self) -> Index:
        return self._index

    @property
    def embedder(self) -> SentenceEmbedder:
        return self._embedder

    @property
    def ranker(self) -> Ranker | None:
        """What makes token vectors for storage and features of hits; None without a reranker that wants them."""
        return self._ranker

    def retriever(self, mode: SearchMode | None = None) -> Retriever:
        """Another way of searching the same index: dense, sparse or hybrid."""
        search = self.config.search.model_copy(update={"mode": mode} if mode else {})
        return Retriever(search, self._embedder, self._sparse, self._index, self._ranker)

    def reranker(self) -> Reranker:
        """The configured reranker, sharing this service's embedder where it can."""
        ranker = self._ranker
        if ranker is not None:
            weight = self.config.reranker.hybrid_weight
            return LateInteractionReranker(ranker.model, lambda: (self._embedder, ranker), weight)
        return load_reranker(self.config, self._cache_folder)

    def search(self, request: SearchRequest) -> SearchResult:
        return self._retriever.search(request)

    def ingest(self, documents: Sequence[Document]) -> JobStatus:
        """Queue documents of one tenant (their own ``tenant`` field)."""
        return self._jobs.submit_documents(documents, documents[0].tenant if documents else "default")

    def ingest_files(self, files: Sequence[tuple[str, bytes]], domain: str | None, tenant: str) -> JobStatus:
        """Queue files (name, bytes); what each is read as follows from its suffix."""
        return self._jobs.submit_files(files, domain, tenant)

    def job(self, job_id: str, tenant: str) -> JobStatus | None:
        return self._jobs.get(job_id, tenant)

    def job_counts(self) -> JobCounts:
        """Jobs waiting, and how those of this process have ended."""
        return self._jobs.counts()

    def wait(self, job_id: str, timeout: float | None = None) -> JobStatus:
        """Block until a job has ended."""
        return self._jobs.wait(job_id, timeout)

    def cancel_job(self, job_id: str, tenant: str) -> JobStatus | None:
        return self._jobs.cancel(job_id, tenant)

    def documents(
        self, tenant: str, domain: str | None = None, limit: int = 100, offset: str | None = None
    ) -> tuple[list[DocumentInfo], str | None]:
        """A page of the tenant's documents, and the offset of the next page."""
        return self._index.documents(tenant, domain, limit, offset)

    def document(self, document_id: str, tenant: str) -> tuple[DocumentInfo, list[Passage]] | None:
        info = self._index.document(tenant, document_id)
        return (info, self._index.passages(tenant, document_id)) if info else None

    def delete(self, document_id: str, tenant: str) -> bool:
        """False when the tenant has no such document."""
        return self._index.delete(tenant, document_id)

    def ready(self) -> dict[str, str]:
        """Name → why it is not ready; empty when ready."""
        if self._closed.is_set():
            return {"index": "The index is closed."}
        if self._rebuilding:
            return {"index": self._rebuilding}
        try:
            self._index.count()
        except Exception as error:  # whatever the client raises means: not reachable
            return {"index": f"The index is not reachable: {error}"}
        return {}

    def close(self) -> None:
        """Finish the document being written and release the index. Calling it again does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._jobs.close()
        if self._rebuilder is not None:
            self._rebuilder.join()
        self._index.close()

    def wait_until_rebuilt(self) -> None:
        """Block until documents of a collection made with other settings have been taken over."""
        if self._rebuilder is not None:
            self._rebuilder.join()

    def _start_rebuild(self) -> threading.Thread | None:
        """Settings changed: fill the new collection from the old one's documents, then switch the alias.

        Cut off in between, it goes on at the next start; the old collection stays until then.
        """
        old = self._collections.current()
        if old is None or old == self._name:
            self._collections.switch(self._name)
            return None
        self._rebuilding = "The index is being rebuilt with other settings."
        thread = threading.Thread(target=self._rebuild, args=(old,), name="rebuild", daemon=True)
        thread.start()
        return thread

    def _rebuild(self, old: str) -> None:
        try:
            source = self._collections.open(old, None)
            try:
                progress = self.ingestion.run(
                    stored_documents(source), self._show_rebuild, self._closed.is_set
                )
            finally:
                source.close()
        except Exception as error:  # the service must go on to say what is wrong
            self._rebuilding = f"The index could not be rebuilt: {error}"
            return
        if progress.num_failed:
            self._rebuilding = f"The index could not be rebuilt: {progress.failures[0][1]}"
        elif not self._closed.is_set():
            self._collections.switch(self._name)
            self._rebuilding = None

    def _show_rebuild(self, progress: Progress) -> None:
        self._rebuilding = (
            f"The index is being rebuilt with other settings: {progress.num_done} documents done."
        )

    def _fingerprint(self) -> str:
        """A digest of everything that stored vectors depend on: another digest, another collection."""
        parts = {
            "embedder": self._embedder.name,
            "prefix": self.config.embedder.passage_prefix,
            "chunking": self.config.chunking.model_dump(),
            "tokens": self._ranker.name if self._ranker else None,
            "format": 1,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
