"""Documents into the index: chunk, embed in full batches, replace atomically."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from retrieval.chunk_encoder import ChunkEncoder
from retrieval.chunking import Chunk, Chunker, document_version
from retrieval.index.record import Index, IndexedChunk, IndexedDocument
from retrieval.loaders import LoadFailure
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


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A document cut into chunks, to be written under ``version``."""

    document: Document
    version: str
    chunks: list[Chunk]


class Ingestion:
    """Writes documents to one index. Running the same documents again does nothing, so a run that was cut
    off is resumed by running it again."""

    def __init__(
        self,
        chunker: Chunker,
        encoder: ChunkEncoder,
        index: Index,
        batch_chunks: int = 256,
        optimize_every: int = 5000,
    ) -> None:
        self._chunker = chunker
        self._encoder = encoder
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

        While batches of chunks are embedded (one, or one a core), the one before is written and the one after
        is read and cut. Memory stays bounded by these: ``items`` may be a generator over any number of documents.
        """
        progress = Progress()
        with self._run_lock, self._encoder.running() as encode:
            waiting: deque[tuple[list[_Prepared], Future[list[IndexedChunk]]]] = deque()
            num_unoptimized = 0
            for batch in self._batches(items, progress, on_progress, is_cancelled):
                waiting.append((batch, encode([chunk for one in batch for chunk in one.chunks])))
                if len(waiting) > self._encoder.num_at_once:
                    num_unoptimized += self._write(*waiting.popleft(), progress)
                    on_progress(progress)
                if self._optimize_every and num_unoptimized >= self._optimize_every:
                    self._index.optimize()
                    num_unoptimized = 0
            while waiting and not is_cancelled():
                num_unoptimized += self._write(*waiting.popleft(), progress)
            if num_unoptimized:
                self._index.optimize()
        on_progress(progress)
        return progress

    def _batches(
        self,
        items: Iterable[Document | LoadFailure],
        progress: Progress,
        on_progress: Callable[[Progress], None],
        is_cancelled: Callable[[], bool],
    ) -> Iterator[list[_Prepared]]:
        """What is to be written, about ``batch_chunks`` chunks at a time; ends early when cancelled."""
        batch: list[_Prepared] = []
        num_chunks = 0
        for item in items:
            if is_cancelled():
                return
            progress.num_documents += 1
            prepared = self._prepare(item, progress)
            if prepared is not None:
                batch.append(prepared)
                num_chunks += len(prepared.chunks)
            if num_chunks >= self._batch_chunks:
                yield batch
                batch, num_chunks = [], 0
            on_progress(progress)
        if batch and not is_cancelled():
            yield batch

    def _prepare(self, item: Document | LoadFailure, progress: Progress) -> _Prepared | None:
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
        return _Prepared(item, version, chunks)

    def _write(
        self, batch: Sequence[_Prepared], encoded: Future[list[IndexedChunk]], progress: Progress
    ) -> int:
        """Replace each document as soon as the batch is encoded; returns how many chunks were written."""
        chunks = iter(encoded.result())
        num_written = 0
        for one in batch:
            ready = [next(chunks) for _ in one.chunks]
            document = one.document
            try:
                self._index.replace(
                    IndexedDocument(
                        id=document.id,
                        tenant=document.tenant,
                        domain=document.domain,
                        title=document.title,
                        text=document.text,
                        version=one.version,
                        metadata=document.metadata,
                        chunks=ready,
                    )
                )
            except RetrievalError as error:
                progress.fail(document.id, str(error))
                continue
            progress.num_done += 1
            num_written += len(ready)
        progress.num_chunks += num_written
        return num_written


def _problem(document: Document) -> str | None:
    if not document.id or len(document.id) > 512:
        return "A document's id has 1 to 512 characters."
    if not document.tenant or not document.domain:
        return "A document needs a tenant and a domain."
    return None
