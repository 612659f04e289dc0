"""Chunks to what the index stores of them, in threads of their own so that the embedder never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from retrieval.chunking import Chunk
from retrieval.embedder import Encoding, SentenceEmbedder
from retrieval.index.record import IndexedChunk
from retrieval.reranker import Ranker
from retrieval.sparse import Bm25Encoder
from retrieval.token_vectors import pack

Encode = Callable[[Sequence[Chunk]], "Future[list[IndexedChunk]]"]


class ChunkEncoder:
    """Dense vectors, BM25 weights and packed token vectors of chunks."""

    def __init__(self, embedder: SentenceEmbedder, sparse: Bm25Encoder, ranker: Ranker | None) -> None:
        """``ranker`` None: no token vectors are made."""
        self._embedder = embedder
        self._sparse = sparse
        self._ranker = ranker

    @contextmanager
    def running(self) -> Iterator[Encode]:
        """A function that takes chunks and answers at once with what will be their encoding, in their order.

        One thread runs the model, batch after batch; another packs what it made, while the caller reads,
        cuts and writes. What was not begun when the caller leaves is dropped.
        """
        with ThreadPoolExecutor(1, "packing") as packing, ThreadPoolExecutor(1, "embedding") as embedding:
            try:
                yield lambda chunks: embedding.submit(self._encode, chunks, packing)
            finally:
                embedding.shutdown(wait=True, cancel_futures=True)

    def _encode(self, chunks: Sequence[Chunk], packing: ThreadPoolExecutor) -> list[IndexedChunk]:
        made: dict[int, Future[IndexedChunk]] = {}
        for place, encoding in self._embedder.each_passage([chunk.indexed_text for chunk in chunks]):
            made[place] = packing.submit(self._indexed, chunks[place], encoding)
        return [made[place].result() for place in range(len(chunks))]

    def _indexed(self, chunk: Chunk, encoding: Encoding) -> IndexedChunk:
        return IndexedChunk(
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

    def _token_vectors(self, chunk: Chunk, encoding: Encoding) -> bytes | None:
        if self._ranker is None:
            return None
        return pack(self._ranker.extractor.passage(encoding, self._embedder.num_tokens(chunk.context)))
