"""Reranker: (query, passages) scored in batches that form while the model is busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from deployments.batcher import Batcher
from deployments.observed import observe
from deployments.worker import Worker, busy
from rag_service.config import Settings
from rag_service.tracing import span
from retrieval.types import Passage, Reranker, ScoredPassage

Pair = tuple[str, Sequence[Passage]]


@runtime_checkable
class BatchReranker(Protocol):
    """A reranker that scores several requests in one forward pass."""

    def score_batch(self, requests: Sequence[Pair]) -> list[list[float]]: ...


class RerankerReplica:
    """Orders passages best first. Requests that arrive during a forward pass share the next one, as many as
    have ``max_batch_passages`` passages in all; a bad request among them fails alone."""

    def __init__(self, settings: Settings, reranker: Reranker | None = None) -> None:
        # Here, not above: the process that builds the application imports this module and needs no torch.
        from retrieval.reranker import load_reranker

        observe(settings)
        config = settings.retrieval
        self._reranker = reranker or load_reranker(config, settings.cache_folder)
        self._worker = Worker("Reranker")
        per_request = max(settings.prompt.candidates, 1)
        self._batcher: Batcher[Pair, list[float]] = Batcher(
            self._score, max_batch_size=max(1, config.reranker.max_batch_passages // per_request)
        )

    async def rerank(
        self, query: str, passages: Sequence[ScoredPassage], trace: str | None = None
    ) -> list[ScoredPassage]:
        """The passages with the reranker's scores, best first; equal scores keep their order."""
        if not passages:
            return []
        with span("score passages", trace):
            scores = await self._batcher.submit((query, [scored.passage for scored in passages]))
        rescored = [replace(scored, score=score) for scored, score in zip(passages, scores, strict=True)]
        return sorted(rescored, key=lambda scored: -scored.score)

    async def ready(self) -> dict[str, str]:
        return {}

    async def status(self) -> dict[str, Any]:
        """Process id and load, as plain JSON."""
        return {
            **busy(self._worker),
            "num_batches": self._batcher.num_batches,
            "num_items": self._batcher.num_items,
        }

    def check_health(self) -> None:
        """Called by Serve; raising has the replica replaced."""
        self._worker.check()

    async def _score(self, pairs: list[Pair]) -> list[list[float]]:
        return await self._worker.run(self._score_now, pairs)

    def _score_now(self, pairs: list[Pair]) -> list[list[float]]:
        if isinstance(self._reranker, BatchReranker):
            return self._reranker.score_batch(pairs)
        return [self._reranker.score(query, passages) for query, passages in pairs]
