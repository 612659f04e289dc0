"""Chunks to what the index stores of them, in threads of their own so that the embedder never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

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

    @property
    def num_at_once(self) -> int:
        """Calls that are worked on at the same time."""
        return self._embedder.num_at_once

    @contextmanager
    def running(self) -> Iterator[Encode]:
        """A function that takes chunks and answers at once with what will be their encoding, in their order.

        ``num_at_once`` threads run the model; another packs what they made, while the caller reads, cuts and
        writes. What was not begun when the caller leaves is dropped.
        """
        num_at_once = self.num_at_once
        single = partial(torch.set_num_threads, 1) if num_at_once > 1 else None
        embedding = ThreadPoolExecutor(num_at_once, "embedding", initializer=single)
        with ThreadPoolExecutor(1, "packing") as packing, embedding:
            try:
                yield lambda chunks: embedding.submit(self._encode, chunks, packing)
            finally:
                embedding.shutdown(wait=True, cancel_futures=True)
                if single is not None:
                    # Each thread has its own number; this one is for threads that begin later.
                    torch.set_num_threads(num_at_once)

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
