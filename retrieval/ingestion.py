"""Documents into the index: chunk, embed in full batches, replace atomically."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from retrieval.chunking import Chunk, Chunker, document_version
from retrieval.embedder import Encoding, SentenceEmbedder
from retrieval.index.record import Index, IndexedChunk, IndexedDocument
from retrieval.loaders import LoadFailure
from retrieval.reranker import Ranker
from retrieval.sparse import Bm25Encoder
from retrieval.token_vectors import pack
from retrieval.types import Document, RetrievalError

_MAX_FAILURES = 1000
"""Failures that are listed; beyond these they are counted only."""


@dataclass(slots=True)
class Progress:
    """What a run has done so far. ``num_documents`` counts documents seen, failed files included."""

    num_documents: int = 0
    num_done: int = 0
    num_unchanged: int = 0
    num_chunks: int = 0
    num_failed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)

    def fail(self, name: str, reason: str) -> None:
        self.num_failed += 1
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append((name, reason))


class Ingestion:
    """Writes documents to one index. Running the same documents again does nothing, so a run that was cut
    off is resumed by running it again."""

    def __init__(
        self,
        chunker: Chunker,
        embedder: SentenceEmbedder,
        sparse: Bm25Encoder,
        ranker: Ranker | None,
        index: Index,
        batch_chunks: int = 256,
        optimize_every: int = 5000,
    ) -> None:
        """``ranker`` None: no token vectors are stored."""
        self._chunker = chunker
        self._embedder = embedder
        self._sparse = sparse
        self._ranker = ranker
        self._index = index
        self._batch_chunks = batch_chunks
        self._optimize_every = optimize_every
        self._run_lock = threading.Lock()

    def run(
        self,
        items: Iterable[Document | LoadFailure],
        on_progress: Callable[[Progress], None] = lambda progress: None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Progress:
        """Ingest everything; a document that fails is recorded and the rest goes on.

        Memory stays bounded by a batch: ``items`` may be a generator over any number of documents.
        """
        progress = Progress()
        pending: list[tuple[Document, str, list[Chunk]]] = []
        num_pending = num_since_optimized = 0
        with self._run_lock:
            for item in items:
                if is_cancelled():
                    break
                progress.num_documents += 1
                chunked = self._prepare(item, progress)
                if chunked is not None:
                    pending.append(chunked)
                    num_pending += len(chunked[2])
                if num_pending >= self._batch_chunks:
                    self._write(pending, progress)
                    num_since_optimized += num_pending
                    pending, num_pending = [], 0
                    if self._optimize_every and num_since_optimized >= self._optimize_every:
                        self._index.optimize()
                        num_since_optimized = 0
                on_progress(progress)
            if not is_cancelled():
                self._write(pending, progress)
                num_since_optimized += num_pending
            if num_since_optimized:
                self._index.optimize()
        on_progress(progress)
        return progress

    def _prepare(
        self, item: Document | LoadFailure, progress: Progress
    ) -> tuple[Document, str, list[Chunk]] | None:
        """The document cut into chunks; None when it failed or stands in the index already."""
        if isinstance(item, LoadFailure):
            progress.fail(item.name, item.reason)
            return None
        problem = _problem(item)
        if problem:
            progress.fail(item.id, problem)
            return None
        version = document_version(item)
        if self._index.version(item.tenant, item.id) == version:
            progress.num_done += 1
            progress.num_unchanged += 1
            return None
        chunks = self._chunker.chunk(item)
        if not chunks:
            progress.fail(item.id, "The document has no text.")
            return None
        return item, version, chunks

    def _write(self, pending: Sequence[tuple[Document, str, list[Chunk]]], progress: Progress) -> None:
        chunks = [chunk for _, _, document_chunks in pending for chunk in document_chunks]
        indexed = iter(self._embed(chunks))
        for document, version, document_chunks in pending:
            ready = [next(indexed) for _ in document_chunks]
            try:
                self._index.replace(
                    IndexedDocument(
                        id=document.id,
                        tenant=document.tenant,
                        domain=document.domain,
                        title=document.title,
                        text=document.text,
                        version=version,
                        metadata=document.metadata,
                        chunks=ready,
                    )
                )
            except RetrievalError as error:
                progress.fail(document.id, str(error))
                continue
            progress.num_done += 1
            progress.num_chunks += len(ready)

    def _embed(self, chunks: Sequence[Chunk]) -> list[IndexedChunk]:
        encodings = self._embedder.encode_passages([chunk.indexed_text for chunk in chunks])
        return [
            IndexedChunk(
                id=chunk.id,
                index=chunk.index,
                text=chunk.text,
                start=chunk.start,
                end=chunk.end,
                section=chunk.section,
                dense=encoding.dense,
                sparse=self._sparse.document(chunk.indexed_text),
                token_vectors=self._token_vectors(chunk, encoding),
            )
            for chunk, encoding in zip(chunks, encodings, strict=True)
        ]

    def _token_vectors(self, chunk: Chunk, encoding: Encoding) -> bytes | None:
        if self._ranker is None:
            return None
        return pack(self._ranker.extractor.passage(encoding, self._embedder.num_tokens(chunk.context)))


def _problem(document: Document) -> str | None:
    if not document.id or len(document.id) > 512:
        return "A document's id has 1 to 512 characters."
    if not document.tenant or not document.domain:
        return "A document needs a tenant and a domain."
    return None
