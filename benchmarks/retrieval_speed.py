"""How fast retrieval is: engines, the query path at 10,000 chunks, ingestion against the bare embedder.

    python benchmarks/retrieval_speed.py [--quick] [--json]

Texts are made up of common words, vectors of the packaged embedder; the number of chunks is what matters
here, quality is ``rag-service evaluate retrieval``'s business. ``--quick``: 1,000 chunks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from harness import parser, publish
from qdrant_client import QdrantClient

from retrieval.chunking import chunk_id
from retrieval.config import EmbedderConfig, RerankerConfig, RetrievalConfig
from retrieval.fusion import Fusion
from retrieval.index.edge import EdgeIndex
from retrieval.index.record import Index, IndexedChunk, IndexedDocument, IndexQuery
from retrieval.index.server import ServerIndex
from retrieval.service import RetrievalService
from retrieval.sparse import Bm25Encoder
from retrieval.types import Document, SearchRequest

_WORD_LIST = (
    "account annual answer board capital charge claim clause contract cost court data date decision disease "
    "dose effect error event expense file function group income index interest law level list method model "
    "module notice object option parameter patient payment period policy price privacy process product rate "
    "report result return right risk sample section service share source state study system table term test "
    "text thread time trial type user value version year"
)
WORDS = _WORD_LIST.split()
CHUNKS_PER_DOCUMENT = 10
WORDS_PER_CHUNK = 150
NUM_QUERIES = 60


def words(random: np.random.Generator, count: int) -> str:
    """Sentences of ten words each, some of them rare."""
    chosen = [str(word) for word in random.choice(WORDS, count)]
    rare = [f"{word}{random.integers(500)}" if i % 7 == 0 else word for i, word in enumerate(chosen)]
    return " ".join(word + ("." if i % 10 == 9 else "") for i, word in enumerate(rare))


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {"p50": float(np.percentile(seconds, 50)), "p95": float(np.percentile(seconds, 95))}


def timed(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def made_up_documents(num_chunks: int) -> list[IndexedDocument]:
    """Documents with random vectors: for the engines alone."""
    random, sparse = np.random.default_rng(0), Bm25Encoder()
    documents = []
    for number in range(num_chunks // CHUNKS_PER_DOCUMENT):
        chunks = []
        for i in range(CHUNKS_PER_DOCUMENT):
            text = words(random, WORDS_PER_CHUNK)
            dense = random.standard_normal(384).astype(np.float32)
            identity = chunk_id("default", str(number), "v", i)
            vector = dense / np.linalg.norm(dense)
            chunks.append(
                IndexedChunk(identity, i, text, 0, len(text), "", vector, sparse.document(text), bytes(7000))
            )
        domain = f"domain-{number % 5}"
        documents.append(IndexedDocument(str(number), "default", domain, "", "", "v", {}, chunks))
    return documents


def engines(num_chunks: int) -> dict[str, Any]:
    """Embedded engine against the Python client's local mode: writing, and filtered hybrid search."""
    documents = made_up_documents(num_chunks)
    random, sparse = np.random.default_rng(1), Bm25Encoder()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        candidates: dict[str, Index] = {
            "qdrant-edge": EdgeIndex(Path(folder) / "edge", 384),
            "qdrant-client local": ServerIndex(QdrantClient(path=str(Path(folder) / "local")), "bench", 384),
        }
        for name, index in candidates.items():
            write = timed(lambda index=index: [index.replace(document) for document in documents])  # type: ignore[misc]
            optimise = timed(index.optimize)
            searches = []
            for _ in range(NUM_QUERIES // 3):
                dense = random.standard_normal(384).astype(np.float32)
                asked = sparse.query(words(random, 8))
                query = IndexQuery("default", dense, asked, 20, Fusion(), "domain-1", with_token_vectors=True)
                searches.append(timed(lambda query=query, index=index: index.search(query)))  # type: ignore[misc]
            index.close()
            result[name] = {
                "write_ms_per_chunk": 1000 * write / num_chunks,
                "optimise_seconds": optimise,
                "search_seconds": percentiles(searches),
            }
    return result


def query_path(service: RetrievalService, depth: int) -> dict[str, dict[str, float]]:
    """Seconds of each stage over all chunks, one query at a time."""
    random = np.random.default_rng(2)
    reranker = service.reranker()
    stages: dict[str, list[float]] = {"embed": [], "search": [], "rerank": [], "total": []}
    for number in range(NUM_QUERIES + 3):
        question = f"What is the {words(random, 9)}?"
        found = service.search(SearchRequest(question, top_k=depth))
        passages = [hit.passage for hit in found.passages]
        rerank = timed(lambda question=question, passages=passages: reranker.score(question, passages))  # type: ignore[misc]
        if number >= 3:
            seconds = {"embed": found.embed_seconds, "search": found.search_seconds, "rerank": rerank}
            for stage, spent in {**seconds, "total": sum(seconds.values())}.items():
                stages[stage].append(spent)
    return {stage: percentiles(values) for stage, values in stages.items()}


def run(num_chunks: int, cache_folder: Path) -> dict[str, Any]:
    random = np.random.default_rng(3)
    config = RetrievalConfig(embedder=EmbedderConfig(num_threads=1), reranker=RerankerConfig(num_threads=1))
    texts = [
        words(random, WORDS_PER_CHUNK * CHUNKS_PER_DOCUMENT) for _ in range(num_chunks // CHUNKS_PER_DOCUMENT)
    ]
    documents = [Document(str(i), "general", "", text) for i, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        service = RetrievalService(config, cache_folder, Path(folder))
        try:
            ingest = timed(lambda: service.ingestion.run(documents))
            indexed = service.index.count()
            sample = [
                p.text
                for i in range(min(20, len(documents)))
                for p in service.index.passages("default", str(i))
            ]
            bare = timed(lambda: service.embedder.encode(sample)) / len(sample)
            path = query_path(service, 20)
        finally:
            service.close()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        "num_chunks": indexed,
        "threads": torch.get_num_threads(),
        "ingest_chunks_per_second": indexed / ingest,
        "bare_embedder_chunks_per_second": 1 / bare,
        "ingest_over_embedder": (indexed / ingest) * bare,
        "bytes_per_chunk_on_disk": size / indexed,
        "latency": path,
        "engines": engines(num_chunks),
    }


def main() -> int:
    arguments = parser("How fast retrieval is: engines, query path, ingestion.").parse_args()
    cache = Path(os.environ.get("RAG_SERVICE_CACHE") or Path.home() / ".cache" / "rag-service")
    publish("retrieval_speed", run(1000 if arguments.quick else 10_000, cache), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
