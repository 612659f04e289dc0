from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrieval.evaluation import (
    Question,
    evaluate,
    limit_per_domain,
    load_questions,
    relevant_chunks,
    score_rankings,
)
from retrieval.types import Passage, RetrievalError, ScoredPassage, SearchRequest, SearchResult


def chunk(number: int, start: int, end: int) -> Passage:
    return Passage("d", f"c{number}", "x", {"start": start, "end": end})


CHUNKS = [chunk(0, 0, 100), chunk(1, 100, 200), chunk(2, 200, 300)]
QUESTION = Question("q", "legal", "what?", (("d", 150, 210),))


def test_a_chunk_counts_when_it_overlaps_half_of_the_shorter() -> None:
    assert relevant_chunks(QUESTION, lambda _: CHUNKS) == {"c1"}
    inside = Question("q", "legal", "?", (("d", 0, 300),))
    assert relevant_chunks(inside, lambda _: CHUNKS) == {"c0", "c1", "c2"}
    edge = Question("q", "legal", "?", (("d", 190, 210),))
    assert relevant_chunks(edge, lambda _: CHUNKS) == {"c1", "c2"}
    touching = Question("q", "legal", "?", (("d", 300, 300),))
    assert relevant_chunks(touching, lambda _: CHUNKS) == set()


def test_figures_by_hand() -> None:
    questions = [QUESTION, Question("r", "finance", "?", (("d", 0, 300),))]
    relevance = {"q": {"c1"}, "r": {"c0", "c1", "c2"}}
    rankings = {"q": ["c9", "c1"], "r": ["c0", "c8", "c1"]}
    figures = score_rankings(questions, relevance, rankings)
    assert figures["legal"]["mrr"] == pytest.approx(0.5)
    assert figures["legal"]["ndcg@10"] == pytest.approx(0.6309, abs=1e-4)
    assert figures["finance"]["recall@10"] == pytest.approx(2 / 3)
    assert figures["finance"]["recall@1"] == pytest.approx(1 / 3)
    assert figures["finance"]["ndcg@10"] == pytest.approx(1.5 / 2.1309, abs=1e-4)
    assert figures["all"]["num_questions"] == 2


def test_a_reranker_reorders_and_missing_documents_are_counted() -> None:
    hits = tuple(ScoredPassage(passage, 1.0) for passage in CHUNKS)

    def search(request: SearchRequest) -> SearchResult:
        return SearchResult(hits, 0.001, 0.002)

    class Backwards:
        def score(self, query: str, passages: object) -> list[float]:
            return [0.0, 1.0, 0.5]

    lost = Question("lost", "legal", "?", (("gone", 0, 10),))

    def chunks_of(document_id: str) -> list[Passage]:
        return CHUNKS if document_id == "d" else []

    plain, _ = evaluate([QUESTION, lost], chunks_of, search)
    reranked, latencies = evaluate([QUESTION, lost], chunks_of, search, Backwards())
    assert plain["all"]["mrr"] == pytest.approx(0.5)
    assert reranked["all"]["mrr"] == pytest.approx(1.0)
    assert reranked["all"]["num_without_passage"] == 1
    assert set(latencies.summary()) == {"embed", "search", "rerank", "total"}
    assert latencies.summary()["search"]["p50"] == pytest.approx(0.002)


def test_limits_hold_in_each_domain_and_are_reproducible() -> None:
    questions = [Question(str(i), "a" if i % 3 else "b", "?", ()) for i in range(90)]
    chosen = limit_per_domain(questions, 5)
    assert sorted(q.domain for q in chosen) == ["a"] * 5 + ["b"] * 5
    assert chosen == limit_per_domain(questions, 5)
    assert limit_per_domain(questions, None) == questions


def test_a_bad_question_is_named_by_file_and_line(tmp_path: Path) -> None:
    good = {"id": "q", "domain": "a", "question": "?", "relevant_spans": [["d", 0, 1]]}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps({"id": "r"}) + "\n")
    with pytest.raises(RetrievalError, match=r"questions\.jsonl, line 2"):
        load_questions([path])
    path.write_text("")
    with pytest.raises(RetrievalError, match="no questions"):
        load_questions([path])
