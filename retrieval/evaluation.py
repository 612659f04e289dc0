"""How good the retrieval is, on questions whose answering passages are known."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ir_measures
import numpy as np
from ir_measures import RR, R, nDCG
from scipy.stats import bootstrap

from retrieval.types import Passage, Reranker, RetrievalError, SearchRequest, SearchResult

MEASURES = {
    "ndcg@10": nDCG @ 10,
    "recall@1": R @ 1,
    "recall@3": R @ 3,
    "recall@5": R @ 5,
    "recall@10": R @ 10,
    "mrr": RR,
}
INTERVALS = ("ndcg@10", "recall@10", "mrr")
_RESAMPLES = 1000
_CONFIDENCE = 0.95

Search = Callable[[SearchRequest], SearchResult]
ChunksOf = Callable[[str], Sequence[Passage]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the spans (document id, start, end) of the documents' text that answer it."""

    id: str
    domain: str
    text: str
    relevant_spans: tuple[tuple[str, int, int], ...]
    answers: tuple[str, ...] = ()


@dataclass(slots=True)
class Latencies:
    """Seconds of each stage, one entry a query."""

    stages: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def summary(self) -> dict[str, dict[str, float]]:
        """Stage → p50 and p95, in seconds."""
        return {
            stage: {"p50": float(np.percentile(values, 50)), "p95": float(np.percentile(values, 95))}
            for stage, values in self.stages.items()
        }


def load_questions(paths: Iterable[Path]) -> list[Question]:
    """JSON Lines with id, domain, question and relevant_spans. Raises ``RetrievalError`` naming file and line."""
    questions: list[Question] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise RetrievalError(f"{path} cannot be read: {error.strerror}.", "file_not_found") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                questions.append(_question(line, f"{path}, line {number}", path.parent.name))
    if not questions:
        raise RetrievalError("The files hold no questions.", "no_questions")
    return questions


def limit_per_domain(questions: Sequence[Question], limit: int | None, seed: int = 0) -> list[Question]:
    """At most ``limit`` questions of each domain, drawn at random, in their order."""
    if limit is None:
        return list(questions)
    order = np.random.default_rng(seed).permutation(len(questions))
    counts: dict[str, int] = defaultdict(int)
    chosen = []
    for i in order:
        domain = questions[int(i)].domain
        if counts[domain] < limit:
            counts[domain] += 1
            chosen.append(int(i))
    return [questions[i] for i in sorted(chosen)]


def relevant_chunks(question: Question, chunks_of: ChunksOf) -> set[str]:
    """Ids of the chunks that lie in the same document as a span and overlap at least half of the shorter one."""
    found: set[str] = set()
    for document_id, start, end in question.relevant_spans:
        for chunk in chunks_of(document_id):
            low, high = int(chunk.metadata["start"]), int(chunk.metadata["end"])
            overlap = min(end, high) - max(start, low)
            if overlap > 0 and overlap >= 0.5 * min(end - start, high - low):
                found.add(chunk.chunk_id)
    return found


def evaluate(
    questions: Sequence[Question],
    chunks_of: ChunksOf,
    search: Search,
    reranker: Reranker | None = None,
    top_k: int = 30,
    on_question: Callable[[], None] = lambda: None,
) -> tuple[dict[str, dict[str, Any]], Latencies]:
    """Figures by domain and for ``all``, and latencies. Searches all domains at once.

    Questions of which no chunk is relevant (their document is not in the index) are left out and counted as
    ``num_without_passage``.
    """
    latencies = Latencies()
    relevance: dict[str, set[str]] = {}
    rankings: dict[str, list[str]] = {}
    for question in questions:
        on_question()
        relevant = relevant_chunks(question, chunks_of)
        if relevant:
            relevance[question.id] = relevant
            rankings[question.id] = _ranked(question.text, search, reranker, top_k, latencies)
    return score_rankings(questions, relevance, rankings), latencies


def score_rankings(
    questions: Sequence[Question], relevance: Mapping[str, set[str]], rankings: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Figures by domain and for ``all`` of rankings (question id → chunk ids, best first)."""
    run = [
        ir_measures.ScoredDoc(question_id, chunk_id, float(-rank))
        for question_id, chunk_ids in rankings.items()
        for rank, chunk_id in enumerate(chunk_ids)
    ]
    qrels = [
        ir_measures.Qrel(question_id, chunk_id, 1)
        for question_id, ids in relevance.items()
        for chunk_id in ids
    ]
    names = {measure: name for name, measure in MEASURES.items()}
    by_question: dict[str, dict[str, float]] = defaultdict(dict)
    for metric in ir_measures.iter_calc(list(MEASURES.values()), qrels, run):
        by_question[metric.query_id][names[metric.measure]] = metric.value
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        groups[question.domain].append(question)
    groups["all"] = list(questions)
    return {name: _figures(group, by_question, relevance) for name, group in groups.items()}


def _ranked(
    query: str, search: Search, reranker: Reranker | None, top_k: int, latencies: Latencies
) -> list[str]:
    result = search(SearchRequest(query=query, top_k=top_k))
    seconds = {"embed": result.embed_seconds, "search": result.search_seconds}
    passages = [scored.passage for scored in result.passages]
    if reranker is not None:
        started = time.perf_counter()
        scores = reranker.score(query, passages)
        seconds["rerank"] = time.perf_counter() - started
        order = sorted(range(len(passages)), key=lambda i: -scores[i])
        passages = [passages[i] for i in order]
    for stage, spent in {**seconds, "total": sum(seconds.values())}.items():
        latencies.stages[stage].append(spent)
    return [passage.chunk_id for passage in passages]


def _figures(
    questions: Sequence[Question],
    by_question: Mapping[str, Mapping[str, float]],
    relevance: Mapping[str, set[str]],
) -> dict[str, Any]:
    measured = [question.id for question in questions if question.id in relevance]
    figures: dict[str, Any] = {
        "num_questions": len(measured),
        "num_without_passage": len(questions) - len(measured),
    }
    intervals: dict[str, list[float]] = {}
    for name in MEASURES:
        values = np.array([by_question[question_id].get(name, 0.0) for question_id in measured])
        figures[name] = float(values.mean()) if len(values) else None
        if name in INTERVALS and len(values) > 1:
            intervals[name] = _interval(values)
    figures["intervals"] = intervals
    return figures


def _interval(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """95 % percentile bootstrap interval of the mean over questions."""
    if values.min() == values.max():
        return [float(values[0])] * 2
    result = bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, confidence_level=_CONFIDENCE, method="percentile", rng=0
    )
    return [float(result.confidence_interval.low), float(result.confidence_interval.high)]


def _question(line: str, where: str, folder: str) -> Question:
    try:
        record = json.loads(line)
        spans = tuple(
            (str(document), int(start), int(end)) for document, start, end in record["relevant_spans"]
        )
        return Question(
            id=str(record["id"]),
            domain=str(record.get("domain") or folder),
            text=str(record["question"]),
            relevant_spans=spans,
            answers=tuple(str(answer) for answer in record.get("answers") or ()),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RetrievalError(
            f"{where} is no question (id, domain, question, relevant_spans): {error}", "invalid_questions"
        ) from None
