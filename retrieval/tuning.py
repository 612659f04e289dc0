"""What chunk size and rerank depth cost and bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrieval.comparison import compare
from retrieval.config import RetrievalConfig
from retrieval.evaluation import Question
from retrieval.index.record import IndexQuery
from retrieval.service import RetrievalService


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting, its quality over all questions and its latency a query (seconds)."""

    chunk_tokens: int
    batch_size: int
    depth: int
    ndcg: float
    recall: float
    p50_seconds: float
    p95_seconds: float
    bytes_per_chunk: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "chunk_tokens": self.chunk_tokens,
            "batch_size": self.batch_size,
            "depth": self.depth,
            "ndcg@10": self.ndcg,
            "recall@10": self.recall,
            "p50_seconds": self.p50_seconds,
            "p95_seconds": self.p95_seconds,
            "bytes_per_chunk": self.bytes_per_chunk,
        }


def with_chunking(config: RetrievalConfig, max_tokens: int, batch_size: int) -> RetrievalConfig:
    """The same settings with another chunk size (overlap in proportion) and embedding batch."""
    share = config.chunking.overlap_tokens / config.chunking.max_tokens
    chunking = config.chunking.model_copy(
        update={"max_tokens": max_tokens, "overlap_tokens": int(share * max_tokens)}
    )
    embedder = config.embedder.model_copy(update={"batch_size": batch_size})
    return config.model_copy(update={"chunking": chunking, "embedder": embedder})


def measure(
    service: RetrievalService,
    questions: Sequence[Question],
    depths: Sequence[int],
    chunk_tokens: int,
    batch: int,
) -> list[Trial]:
    """One trial a depth; depth 0 is hybrid search alone."""
    stored = _stored_bytes(service, questions[0].text)
    trials = []
    for depth in depths:
        name = "hybrid+rerank" if depth else "hybrid"
        result = compare(service, questions, [name], max(10, depth))
        figures, total = result["configurations"][name]["all"], result["latency"]["total"]
        trials.append(
            Trial(
                chunk_tokens=chunk_tokens,
                batch_size=batch,
                depth=depth,
                ndcg=figures["ndcg@10"],
                recall=figures["recall@10"],
                p50_seconds=total["p50"],
                p95_seconds=total["p95"],
                bytes_per_chunk=stored,
            )
        )
    return trials


def _stored_bytes(service: RetrievalService, question: str) -> int:
    """Bytes of token vectors a chunk, as a mean over ten."""
    dense = service.embedder.encode_queries([question])[0].dense
    hits = service.index.search(IndexQuery("default", dense, None, 10, with_token_vectors=True))
    sizes = [len(hit.passage.token_vectors or b"") for hit in hits]
    return sum(sizes) // max(1, len(sizes))


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """Trials that no other one beats in both quality and latency."""
    return [
        trial
        for trial in trials
        if not any(
            other.ndcg >= trial.ndcg
            and other.p50_seconds <= trial.p50_seconds
            and (other.ndcg > trial.ndcg or other.p50_seconds < trial.p50_seconds)
            for other in trials
        )
    ]
