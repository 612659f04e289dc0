"""Ways of searching one index, compared on the same questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from retrieval.config import SearchMode
from retrieval.evaluation import Question, evaluate
from retrieval.service import RetrievalService
from retrieval.types import Passage, Reranker, RetrievalError

RERANKED = "hybrid+rerank"
_MODES: dict[str, SearchMode] = {"dense": "dense", "sparse": "sparse", "hybrid": "hybrid", RERANKED: "hybrid"}
CONFIGURATIONS = tuple(_MODES)


def compare(
    service: RetrievalService,
    questions: Sequence[Question],
    names: Sequence[str],
    depth: int,
    on_question: Callable[[], None] = lambda: None,
    tenant: str = "default",
) -> dict[str, Any]:
    """``configurations`` → domain → figures, and ``latency`` → stage → p50, p95 (seconds) of the last one.

    ``depth``: how many candidates are searched for and reranked. Raises ``RetrievalError`` for an unknown
    name and for questions of which no document is in the index.
    """
    unknown = [name for name in names if name not in CONFIGURATIONS]
    if unknown or not names:
        known = ", ".join(CONFIGURATIONS)
        raise RetrievalError(
            f"There is no configuration {', '.join(unknown) or '(none)'}; known are {known}."
        )

    @cache
    def chunks_of(document_id: str) -> Sequence[Passage]:
        return service.index.passages(tenant, document_id)

    figures: dict[str, Any] = {}
    latency: dict[str, dict[str, float]] = {}
    for name in names:
        reranker: Reranker | None = service.reranker() if name == RERANKED else None
        search = service.retriever(_MODES[name]).search
        figures[name], latencies = evaluate(questions, chunks_of, search, reranker, depth, on_question)
        if not figures[name]["all"]["num_questions"]:
            raise RetrievalError(
                "No question's document is in the index: name the documents too.", "no_documents"
            )
        latency = latencies.summary()
    return {
        "configurations": figures,
        "latency": latency,
        "depth": depth,
        "num_chunks": service.index.count(),
    }
