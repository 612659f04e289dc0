"""How fast retrieval is: engines, the query path at 10,000 chunks, ingestion against the bare embedder.

    python benchmarks/retrieval_speed.py [--quick] [--json]

Ingestion: documents of common words, chunked, embedded and written, against sentence-transformers alone on
the same chunks, with the threads that torch chooses. The query path: on one core, over 10,000 chunks, most of
them with made-up vectors. Quality is ``rag-service evaluate retrieval``'s business. ``--quick``: 2,000 chunks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from harness import parser, publish
from qdrant_client import QdrantClient
from sentence_transformers import SentenceTransformer

from retrieval.chunking import Chunker, chunk_id
from retrieval.config import RetrievalConfig
from retrieval.embedder import pick_dtype, resolve_model
from retrieval.fusion import Fusion
from retrieval.index.edge import EdgeIndex
from retrieval.index.record import Index, IndexedChunk, IndexedDocument, IndexQuery
from retrieval.index.server import ServerIndex
from retrieval.service import RetrievalService
from retrieval.sparse import Bm25Encoder
from retrieval.token_vectors import TokenVectors, normalise, pack
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
NUM_QUERIES = 200
WARM_UP = 5
DEPTH = 20
ENGINE_CHUNKS = 1000
"""The client's local mode takes tens of milliseconds a chunk."""
TOKEN_ROWS, TOKEN_DIMENSION = 100, 160


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


def both_times(function: Callable[[], Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds by the clock and of the processor (all threads)."""
    clock, processor = time.perf_counter(), time.process_time()
    function()
    return np.array([time.perf_counter() - clock, time.process_time() - processor])


def made_up_documents(num_chunks: int) -> Iterator[IndexedDocument]:
    """Documents with random vectors."""
    random, sparse = np.random.default_rng(0), Bm25Encoder()
    vectors = normalise(random.standard_normal((TOKEN_ROWS, TOKEN_DIMENSION)).astype(np.float32))
    ids = random.integers(1000, 20_000, 2 * TOKEN_ROWS)
    tokens = pack(TokenVectors(vectors, ids, 10))
    for number in range(num_chunks // CHUNKS_PER_DOCUMENT):
        chunks = []
        for i in range(CHUNKS_PER_DOCUMENT):
            text = words(random, WORDS_PER_CHUNK)
            dense = random.standard_normal(384).astype(np.float32)
            identity = chunk_id("default", str(number), "v", i)
            vector = dense / np.linalg.norm(dense)
            chunks.append(
                IndexedChunk(identity, i, text, 0, len(text), "", vector, sparse.document(text), tokens)
            )
        domain = f"domain-{number % 5}"
        yield IndexedDocument(str(number), "default", domain, "", "", "v", {}, chunks)


def engines(num_chunks: int) -> dict[str, Any]:
    """Embedded engine against the Python client's local mode: writing, and filtered hybrid search."""
    documents = list(made_up_documents(num_chunks))
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
            for _ in range(NUM_QUERIES // 10):
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


@contextmanager
def one_core() -> Iterator[None]:
    """This process on one core alone, with one thread a forward pass."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


def query_path(service: RetrievalService, depth: int) -> dict[str, dict[str, float]]:
    """Seconds of each stage over all chunks, one query at a time. ``search`` has the making of the reranker's
    features in it."""
    random = np.random.default_rng(2)
    reranker = service.reranker()
    stages: dict[str, list[float]] = {"embed": [], "search": [], "rerank": [], "total": []}
    for number in range(NUM_QUERIES + WARM_UP):
        question = f"What is the {words(random, 9)}?"
        found = service.search(SearchRequest(question, top_k=depth))
        passages = [hit.passage for hit in found.passages]
        rerank = timed(lambda question=question, passages=passages: reranker.score(question, passages))  # type: ignore[misc]
        if number >= WARM_UP:
            seconds = {"embed": found.embed_seconds, "search": found.search_seconds, "rerank": rerank}
            for stage, spent in {**seconds, "total": sum(seconds.values())}.items():
                stages[stage].append(spent)
    return {stage: percentiles(values) for stage, values in stages.items()}


def ingestion(service: RetrievalService, num_chunks: int, cache_folder: Path) -> dict[str, float]:
    """Chunks a second from documents to the index, and of sentence-transformers alone on the same chunks,
    measured before and after."""
    random, config = np.random.default_rng(3), service.config.embedder
    texts = [words(random, WORDS_PER_CHUNK * CHUNKS_PER_DOCUMENT) for _ in range(num_chunks // 10)]
    documents = [Document(f"ingested-{i}", "general", "", text) for i, text in enumerate(texts)]
    chunker = Chunker(service.config.chunking, service.embedder.tokenizer)
    chunks = [chunk.indexed_text for document in documents for chunk in chunker.chunk(document)]
    bare = SentenceTransformer(resolve_model(config.model, cache_folder), device="cpu")
    bare.to(pick_dtype(config.dtype, "cpu"))
    encode = partial(bare.encode, batch_size=config.batch_size, show_progress_bar=False)
    encode(chunks[:64])
    before = both_times(lambda: encode(chunks))
    ingest = both_times(lambda: service.ingestion.run(documents))
    alone = (before + both_times(lambda: encode(chunks))) / 2
    return {
        "num_ingested_chunks": len(chunks),
        "ingest_chunks_per_second": float(len(chunks) / ingest[0]),
        "bare_embedder_chunks_per_second": float(len(chunks) / alone[0]),
        "ingest_over_embedder": float(alone[0] / ingest[0]),
        "ingest_over_embedder_processor_time": float(alone[1] / ingest[1]),
    }


def fill(index: Index, num_chunks: int) -> None:
    """Up to ``num_chunks`` chunks, with made-up vectors: embedding them would say nothing of searching them."""
    missing = num_chunks - index.count()
    for document in made_up_documents(missing):
        index.replace(document)
    index.optimize()


def run(num_chunks: int, num_ingested: int, cache_folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        service = RetrievalService(RetrievalConfig(), cache_folder, Path(folder))
        try:
            ingested = ingestion(service, num_ingested, cache_folder)
            fill(service.index, num_chunks)
            with one_core():
                path = query_path(service, DEPTH)
            indexed = service.index.count()
        finally:
            service.close()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        "num_chunks": indexed,
        "depth": DEPTH,
        "threads": torch.get_num_threads(),
        **ingested,
        "bytes_per_chunk_on_disk": size / indexed,
        "latency": path,
        "engines": engines(ENGINE_CHUNKS),
    }


def main() -> int:
    arguments = parser("How fast retrieval is: engines, query path, ingestion.").parse_args()
    cache = Path(os.environ.get("RAG_SERVICE_CACHE") or Path.home() / ".cache" / "rag-service")
    publish(
        "retrieval_speed",
        run(2000 if arguments.quick else 10_000, 300 if arguments.quick else 1200, cache),
        arguments.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
