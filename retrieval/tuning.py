"""What chunk size, embedding batch and rerank depth cost and bring."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrieval.comparison import compare
from retrieval.config import RetrievalConfig
from retrieval.embedder import SentenceEmbedder
from retrieval.evaluation import Question
from retrieval.index.record import IndexQuery
from retrieval.service import RetrievalService

EQUAL_QUALITY = 0.005
"""Differences in nDCG@10 up to here are noise on some hundreds of questions."""
_SAMPLED_TEXTS = 96


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting, its quality over all questions and its latency a query (seconds). ``depth`` 0: hybrid
    search alone."""

    chunk_tokens: int
    depth: int
    ndcg: float
    recall: float
    p50_seconds: float
    p95_seconds: float
    bytes_per_chunk: int

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {"ndcg@10": values.pop("ndcg"), "recall@10": values.pop("recall"), **values}


def with_chunking(config: RetrievalConfig, max_tokens: int) -> RetrievalConfig:
    """The same settings with another chunk size (overlap in proportion)."""
    share = config.chunking.overlap_tokens / config.chunking.max_tokens
    chunking = config.chunking.model_copy(
        update={"max_tokens": max_tokens, "overlap_tokens": int(share * max_tokens)}
    )
    return config.model_copy(update={"chunking": chunking})


def measure(
    service: RetrievalService, questions: Sequence[Question], depths: Sequence[int], chunk_tokens: int
) -> list[Trial]:
    """One trial a depth."""
    stored = _stored_bytes(service, questions[0].text)
    trials = []
    for depth in depths:
        name = "hybrid+rerank" if depth else "hybrid"
        result = compare(service, questions, [name], max(10, depth))
        figures, total = result["configurations"][name]["all"], result["latency"]["total"]
        trials.append(
            Trial(
                chunk_tokens=chunk_tokens,
                depth=depth,
                ndcg=figures["ndcg@10"],
                recall=figures["recall@10"],
                p50_seconds=total["p50"],
                p95_seconds=total["p95"],
                bytes_per_chunk=stored,
            )
        )
    return trials


def batch_speeds(
    config: RetrievalConfig, cache_folder: Path | None, texts: Sequence[str], batch_sizes: Sequence[int]
) -> dict[int, float]:
    """Texts a second that the embedder makes of ``texts`` in batches of each size."""
    speeds = {}
    for size in batch_sizes:
        embedder = SentenceEmbedder(config.embedder.model_copy(update={"batch_size": size}), cache_folder)
        embedder.encode(texts[:size])
        started = time.perf_counter()
        embedder.encode(texts)
        speeds[size] = len(texts) / (time.perf_counter() - started)
    return speeds


def sample_texts(service: RetrievalService, questions: Sequence[Question]) -> list[str]:
    """Up to about a hundred chunks of the documents that the questions are about."""
    texts: list[str] = []
    for document_id in dict.fromkeys(span[0] for question in questions for span in question.relevant_spans):
        texts += [passage.text for passage in service.index.passages("default", document_id)]
        if len(texts) >= _SAMPLED_TEXTS:
            break
    return texts[:_SAMPLED_TEXTS]


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


def fastest_equal(trials: Sequence[Trial]) -> tuple[Trial, Trial]:
    """The trial of the best quality, and the fastest one whose quality is the same but for noise."""
    best = max(trials, key=lambda trial: trial.ndcg)
    equal = [trial for trial in trials if trial.ndcg >= best.ndcg - EQUAL_QUALITY]
    return best, min(equal, key=lambda trial: trial.p50_seconds)


def _stored_bytes(service: RetrievalService, question: str) -> int:
    """Bytes of token vectors a chunk, as a mean over ten."""
    dense = service.embedder.encode_queries([question])[0].dense
    hits = service.index.search(IndexQuery("default", dense, None, 10, with_token_vectors=True))
    sizes = [len(hit.passage.token_vectors or b"") for hit in hits]
    return sum(sizes) // max(1, len(sizes))
