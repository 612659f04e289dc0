"""One search: embed the query, search both lists, fuse, tidy up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from retrieval.batching import Batcher
from retrieval.config import SearchConfig
from retrieval.duplicates import drop_near_duplicates
from retrieval.embedder import Encoding, SentenceEmbedder
from retrieval.fusion import Fusion
from retrieval.index.record import Index, IndexQuery
from retrieval.reranker import Ranker
from retrieval.sparse import Bm25Encoder
from retrieval.token_vectors import unpack
from retrieval.types import Passage, RetrievalError, ScoredPassage, SearchRequest, SearchResult

MAX_TOP_K = 500


class Retriever:
    """Searches one index. Thread-safe: queries that arrive together are embedded together."""

    def __init__(
        self,
        config: SearchConfig,
        embedder: SentenceEmbedder,
        sparse: Bm25Encoder,
        index: Index,
        ranker: Ranker | None = None,
    ) -> None:
        """``ranker``: hits carry the features that it ranks by. Here, since the query's encoding and the
        stored token vectors are at hand: a reranker elsewhere would encode the query again and be sent
        hundreds of kilobytes a request."""
        self._config = config
        self._sparse = sparse
        self._index = index
        self._ranker = ranker
        self._queries: Batcher[str, Encoding] = Batcher(embedder.encode_queries, max_batch=64)

    def search(self, request: SearchRequest) -> SearchResult:
        """The ``top_k`` best passages of the request's tenant. Raises ``RetrievalError`` for bad input."""
        _check(request)
        started = time.perf_counter()
        needs_encoding = self._ranker is not None or self._config.mode != "sparse"
        encoding = self._queries(request.query) if needs_encoding else None
        dense = None if encoding is None or self._config.mode == "sparse" else encoding.dense
        sparse = None if self._config.mode == "dense" else self._sparse.query(request.query)
        embedded = time.perf_counter()
        spare = 2 if self._config.near_duplicate_threshold < 1.0 else 1
        hits = self._index.search(
            IndexQuery(
                tenant=request.tenant,
                dense=dense,
                sparse=sparse,
                limit=request.top_k * spare,
                fusion=Fusion(
                    kind=self._config.fusion,
                    dense_weight=self._config.dense_weight,
                    sparse_weight=self._config.sparse_weight,
                    document_weight=self._config.document_weight,
                    rrf_k=self._config.rrf_k,
                    num_candidates=max(self._config.num_candidates, request.top_k * spare),
                ),
                domain=request.domain,
                document_ids=request.document_ids,
                filters=request.filters,
                with_token_vectors=self._ranker is not None,
            )
        )
        hits = drop_near_duplicates(hits, self._config.near_duplicate_threshold)[: request.top_k]
        if self._ranker is not None and encoding is not None:
            hits = _with_features(self._ranker, request.query, encoding, hits)
        if self._config.neighbours:
            hits = self._widen(request.tenant, hits)
        return SearchResult(
            passages=tuple(hits),
            embed_seconds=embedded - started,
            search_seconds=time.perf_counter() - embedded,
        )

    def _widen(self, tenant: str, hits: Sequence[ScoredPassage]) -> list[ScoredPassage]:
        """Each hit with its neighbours' text around it; a hit inside an earlier one's window is dropped."""
        widened: list[ScoredPassage] = []
        covered: set[tuple[str, int]] = set()
        for hit in hits:
            document_id, index = hit.passage.document_id, int(hit.passage.metadata["chunk_index"])
            if (document_id, index) in covered:
                continue
            reach = self._config.neighbours
            wanted = [
                i for i in range(max(0, index - reach), index + reach + 1) if (document_id, i) not in covered
            ]
            parts = self._index.passages(tenant, document_id, wanted)
            parts = _contiguous(parts, index)
            covered.update((document_id, int(part.metadata["chunk_index"])) for part in parts)
            widened.append(
                replace(hit, passage=_join(hit.passage, parts, self._index.text(tenant, document_id)))
            )
        return widened


def _with_features(
    ranker: Ranker, query: str, encoding: Encoding, hits: Sequence[ScoredPassage]
) -> list[ScoredPassage]:
    """The hits with the ranker's features in place of token vectors; those without vectors as they are."""
    passages = [hit.passage for hit in hits]
    if not passages or any(passage.token_vectors is None for passage in passages):
        return list(hits)
    tokens = [unpack(passage.token_vectors or b"") for passage in passages]
    rows = ranker.features(query, encoding, passages, tokens).tolist()
    return [
        replace(hit, passage=replace(hit.passage, token_vectors=None, features=tuple(row)))
        for hit, row in zip(hits, rows, strict=True)
    ]


def _check(request: SearchRequest) -> None:
    if not request.query.strip():
        raise RetrievalError("The query is empty.", "empty_query")
    if not 1 <= request.top_k <= MAX_TOP_K:
        raise RetrievalError(f"top_k must be from 1 to {MAX_TOP_K}; got {request.top_k}.", "invalid_top_k")
    if not request.tenant:
        raise RetrievalError("A search needs a tenant.", "invalid_tenant")


def _contiguous(parts: Sequence[Passage], index: int) -> list[Passage]:
    """The parts that run up to and on from chunk ``index`` without a gap."""
    by_index = {int(part.metadata["chunk_index"]): part for part in parts}
    low = high = index
    while low - 1 in by_index:
        low -= 1
    while high + 1 in by_index:
        high += 1
    return [by_index[i] for i in range(low, high + 1) if i in by_index]


def _join(hit: Passage, parts: Sequence[Passage], text: str) -> Passage:
    """The document's own text from the first part's start to the last one's end."""
    if len(parts) < 2:
        return hit
    start, end = int(parts[0].metadata["start"]), int(parts[-1].metadata["end"])
    return replace(hit, text=text[start:end], metadata={**hit.metadata, "start": start, "end": end})
