"""The Retriever and Reranker replicas in this process, on the real models and the embedded index."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deployments.reranker import RerankerReplica
from deployments.retriever import RetrieverReplica
from rag_service.config import Settings, cache_folder
from retrieval.types import Document, JobStatus, Passage, ScoredPassage, SearchRequest

needs_embedder = pytest.mark.skipif(
    not (cache_folder() / "models" / "all-minilm-l6-v2").exists(),
    reason="the packaged embedding model is not in the cache",
)

TEXTS = {
    "tides": "The tide rises and falls twice a day because of the pull of the moon on the sea.",
    "bread": "Knead the dough for ten minutes, let it rise for an hour, then bake the bread until brown.",
    "court": "The court of appeal dismissed the claim because notice had been served too late.",
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(data_folder=tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def retriever(settings: Settings) -> Iterator[RetrieverReplica]:
    replica = RetrieverReplica(settings)
    yield replica
    replica.__del__()


async def ingest(retriever: RetrieverReplica, tenant: str) -> JobStatus:
    documents = [Document(name, "general", name.title(), text, tenant=tenant) for name, text in TEXTS.items()]
    status = await retriever.ingest(documents)
    while status.state in ("queued", "running"):
        await asyncio.sleep(0.05)
        found = await retriever.job(status.id, tenant)
        assert found is not None
        status = found
    return status


@needs_embedder
async def test_ingest_then_many_searches_at_once(retriever: RetrieverReplica) -> None:
    status = await ingest(retriever, "t1")
    assert (status.state, status.num_done) == ("succeeded", 3)
    assert await retriever.ready() == {}
    queries = {"why does the sea rise": "tides", "how to bake a loaf": "bread", "late notice appeal": "court"}
    requests = [SearchRequest(query, tenant="t1", top_k=1) for query in list(queries) * 5]
    results = await asyncio.gather(*(retriever.search(request) for request in requests))
    found = [result.passages[0].passage.document_id for result in results]
    assert found == list(queries.values()) * 5
    retriever.check_health()


@needs_embedder
async def test_documents_are_listed_read_and_deleted_by_tenant(retriever: RetrieverReplica) -> None:
    await ingest(retriever, "t2")
    documents, _ = await retriever.documents("t2", None, 10, None)
    assert {document.id for document in documents} == set(TEXTS)
    found = await retriever.document("bread", "t2")
    assert found is not None
    assert "".join(passage.text for passage in found[1]) == TEXTS["bread"]
    assert await retriever.document("bread", "nobody") is None
    assert await retriever.delete("bread", "t2")
    assert not await retriever.delete("bread", "t2")
    assert await retriever.job("no-such-job", "t2") is None


@needs_embedder
async def test_the_real_reranker_prefers_the_passage_that_answers(
    retriever: RetrieverReplica, settings: Settings
) -> None:
    await ingest(retriever, "t3")
    result = await retriever.search(SearchRequest("how long should the dough rise", tenant="t3", top_k=3))
    worst_first = sorted(result.passages, key=lambda scored: scored.score)
    replica = RerankerReplica(settings)
    ranked = await replica.rerank("how long should the dough rise", worst_first)
    assert ranked[0].passage.document_id == "bread"
    assert {scored.passage.chunk_id for scored in ranked} == {p.passage.chunk_id for p in worst_first}
    assert [scored.score for scored in ranked] == sorted((s.score for s in ranked), reverse=True)
    assert await replica.rerank("anything", []) == []


class CountingReranker:
    """Scores a passage by its length; refuses the query ``bad``."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]:
        raise AssertionError("a reranker with score_batch is asked in batches")

    def score_batch(self, requests: Sequence[tuple[str, Sequence[Passage]]]) -> list[list[float]]:
        self.batches.append(len(requests))
        if any(query == "bad" for query, _ in requests):
            raise ValueError("bad")
        return [[float(len(passage.text)) for passage in passages] for _, passages in requests]


def scored(*texts: str) -> list[ScoredPassage]:
    return [ScoredPassage(Passage("d", text, text), 0.0) for text in texts]


async def test_requests_share_a_pass_and_a_bad_one_fails_alone() -> None:
    reranker = CountingReranker()
    replica = RerankerReplica(Settings(), reranker)
    queries = ["q"] * 5 + ["bad"]
    answers = await asyncio.gather(
        *(replica.rerank(query, scored("aa", "bbbb", "c")) for query in queries), return_exceptions=True
    )
    for answer in answers[:5]:
        assert not isinstance(answer, BaseException)
        assert [(s.passage.text, s.score) for s in answer] == [("bbbb", 4.0), ("aa", 2.0), ("c", 1.0)]
    assert isinstance(answers[5], ValueError)
    assert max(reranker.batches) > 1


async def test_equal_scores_keep_their_order() -> None:
    ranked = await RerankerReplica(Settings(), CountingReranker()).rerank("q", scored("bb", "aa", "cc"))
    assert [s.passage.text for s in ranked] == ["bb", "aa", "cc"]


def test_the_replica_names_a_missing_model(tmp_path: Path) -> None:
    from retrieval.types import RetrievalError

    with pytest.raises(RetrievalError, match="all-minilm-l6-v2"):
        RetrieverReplica(Settings(cache_folder=tmp_path, data_folder=tmp_path))
