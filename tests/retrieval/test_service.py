"""The whole of retrieval on real parts: embedder, embedded index, jobs, reranker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from retrieval.config import ChunkingConfig, RetrievalConfig, SearchConfig
from retrieval.features import FEATURES
from retrieval.ingestion import Ingestion
from retrieval.loaders import LoadFailure
from retrieval.reranker import load_reranker
from retrieval.service import RetrievalService
from retrieval.types import Document, RetrievalError, SearchRequest

LEASE = Document(
    "lease", "legal", "Lease of 4 Mill Lane",
    "The tenant pays rent of 900 pounds on the first day of each month.\n\n"
    "Pets need the landlord's written consent.\n\nEither side may end the lease with two months' notice.",
)  # fmt: skip
ASTHMA = Document(
    "asthma", "medical", "Asthma leaflet",
    "Salbutamol opens the airways within minutes.\n\nCall an ambulance when two puffs bring no relief.",
)  # fmt: skip
FUNCTION = Document(
    "queue", "software", "queue module",
    "drain_all(queue)\n   Empties the queue and returns its items.\n\n\nfill(queue, items)\n   Adds the items.",
)  # fmt: skip


@pytest.fixture
def filled(service: RetrievalService) -> RetrievalService:
    status = service.wait(service.ingest([LEASE, ASTHMA, FUNCTION]).id)
    assert (status.state, status.num_done, status.failures) == ("succeeded", 3, ())
    return service


def test_search_finds_the_passage_and_its_span(filled: RetrievalService) -> None:
    result = filled.search(SearchRequest("When is the rent due?", top_k=3))
    best = result.passages[0].passage
    assert best.document_id == "lease"
    assert LEASE.text[best.metadata["start"] : best.metadata["end"]] == best.text
    assert best.metadata["title"] == "Lease of 4 Mill Lane"
    assert result.embed_seconds > 0
    by_name = filled.search(SearchRequest("drain_all", domain="software")).passages[0].passage
    assert by_name.document_id == "queue"
    assert filled.search(SearchRequest("rent", domain="finance")).passages == ()


def test_tenants_are_apart_in_every_call(filled: RetrievalService) -> None:
    theirs = replace(LEASE, tenant="globex", text="The rent of globex is secret.")
    filled.wait(filled.ingest([theirs]).id)
    assert filled.search(SearchRequest("rent", tenant="initech")).passages == ()
    own = filled.search(SearchRequest("the secret rent of globex", document_ids=("lease",)))
    assert all("secret" not in hit.passage.text for hit in own.passages)
    assert filled.document("lease", "initech") is None
    assert not filled.delete("lease", "initech")
    job = filled.ingest([theirs])
    assert filled.job(job.id, "default") is None
    assert filled.cancel_job(job.id, "default") is None
    assert filled.wait(job.id).num_unchanged == 1
    assert filled.delete("lease", "globex")
    assert filled.document("lease", "default") is not None


def test_hits_carry_the_rerankers_features_and_those_made_afresh_agree(
    filled: RetrievalService, cache_folder: Path
) -> None:
    query = "Do pets need written consent?"
    passages = [hit.passage for hit in filled.search(SearchRequest(query, top_k=5)).passages]
    assert all(len(passage.features) == len(FEATURES) for passage in passages)
    assert not any(passage.token_vectors for passage in passages)
    reranker = load_reranker(RetrievalConfig(), cache_folder)
    stored = reranker.score(query, passages)
    fresh = reranker.score(query, [replace(passage, features=()) for passage in passages])
    assert stored == pytest.approx(fresh, abs=0.15)
    assert passages[stored.index(max(stored))].document_id == "lease"
    assert reranker.score(query, []) == []


def test_ingesting_again_changes_nothing_and_a_change_replaces(filled: RetrievalService) -> None:
    before = filled.index.count()
    again = filled.wait(filled.ingest([LEASE, ASTHMA, FUNCTION]).id)
    assert (again.num_unchanged, again.num_chunks) == (3, 0)
    changed = replace(LEASE, text="The tenant pays rent of 950 pounds.")
    filled.wait(filled.ingest([changed]).id)
    texts = [p.text for p in filled.document("lease", "default")[1]]  # type: ignore[index]
    assert texts == ["The tenant pays rent of 950 pounds."]
    assert filled.index.count() <= before


def test_documents_of_several_tenants_are_refused_in_one_job(service: RetrievalService) -> None:
    with pytest.raises(RetrievalError, match="one tenant"):
        service.ingest([LEASE, replace(ASTHMA, tenant="globex")])


def test_a_bad_document_fails_alone(service: RetrievalService) -> None:
    job = service.ingest([LEASE, replace(ASTHMA, text=" \n "), replace(ASTHMA, id="")])
    status = service.wait(job.id)
    assert status.state == "succeeded"
    assert status.num_done == 1
    assert [name for name, _ in status.failures] == ["asthma", ""]
    files = [("a.md", b"# Fees\n\nDue in May."), ("b.pdf", b"nonsense")]
    status = service.wait(service.ingest_files(files, "legal", "default").id)
    assert status.num_done == 1
    assert status.failures[0][0] == "b.pdf"
    status = service.wait(service.ingest_files([("b.pdf", b"nonsense")], "legal", "default").id)
    assert status.state == "failed"


def test_jobs_survive_a_restart(cache_folder: Path, tmp_path: Path) -> None:
    gate = threading.Event()
    service = RetrievalService(RetrievalConfig(), cache_folder, tmp_path)
    service._jobs._ingestion = lambda: _Waiting(service.ingestion, gate)  # type: ignore[assignment,return-value]
    first, second = service.ingest([LEASE]), service.ingest([ASTHMA])
    gate.set()
    service.close()
    service = RetrievalService(RetrievalConfig(), cache_folder, tmp_path)
    for job in (first, second):
        if service.job(job.id, "default") is not None:
            assert service.wait(job.id).state == "succeeded"
    assert {info.id for info in service.documents("default")[0]} == {"lease", "asthma"}
    service.close()


class _Waiting:
    """Holds the worker until the gate opens."""

    def __init__(self, ingestion: Ingestion, gate: threading.Event) -> None:
        self._ingestion, self._gate = ingestion, gate

    def run(self, items: Iterator[Document | LoadFailure], *hooks: object) -> object:
        self._gate.wait(30)
        return self._ingestion.run(items, *hooks)  # type: ignore[arg-type]


def test_a_queued_job_can_be_cancelled(service: RetrievalService) -> None:
    gate = threading.Event()
    service._jobs._ingestion = lambda: _Waiting(service.ingestion, gate)  # type: ignore[assignment,return-value]
    running = service.ingest([LEASE])
    while service.job(running.id, "default").state == "queued":  # type: ignore[union-attr]
        time.sleep(0.01)
    waiting = service.ingest([ASTHMA])
    assert service.cancel_job(waiting.id, "default").state == "cancelled"  # type: ignore[union-attr]
    gate.set()
    assert service.wait(running.id).state == "succeeded"
    assert service.document("asthma", "default") is None


def test_other_settings_rebuild_the_index_behind_the_alias(cache_folder: Path, tmp_path: Path) -> None:
    service = RetrievalService(RetrievalConfig(), cache_folder, tmp_path)
    service.wait(service.ingest([LEASE]).id)
    service.wait(service.ingest([replace(ASTHMA, tenant="globex")]).id)
    service.close()
    smaller = RetrievalConfig(chunking=ChunkingConfig(max_tokens=16, overlap_tokens=4))
    service = RetrievalService(smaller, cache_folder, tmp_path)
    service.wait_until_rebuilt()
    assert service.ready() == {}
    assert service.document("lease", "default")[0].num_chunks > 1  # type: ignore[index]
    assert service.document("asthma", "globex") is not None
    assert len([path for path in (tmp_path / "index").iterdir() if path.is_dir()]) == 1
    service.close()


def test_neighbours_are_the_documents_own_text(cache_folder: Path, tmp_path: Path) -> None:
    config = RetrievalConfig(
        chunking=ChunkingConfig(max_tokens=16, overlap_tokens=4), search=SearchConfig(neighbours=1)
    )
    service = RetrievalService(config, cache_folder, tmp_path)
    service.wait(service.ingest([LEASE]).id)
    best = service.search(SearchRequest("Pets and consent", top_k=2)).passages[0].passage
    assert best.text == LEASE.text[best.metadata["start"] : best.metadata["end"]]
    assert "Pets" in best.text
    assert "notice" in best.text or "rent" in best.text
    service.close()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (SearchRequest("  "), "empty_query"),
        (SearchRequest("x", top_k=0), "invalid_top_k"),
        (SearchRequest("x", tenant=""), "invalid_tenant"),
        (SearchRequest("x", filters={"a": None}), "invalid_filter"),
    ],
)
def test_bad_searches_are_refused_by_code(
    filled: RetrievalService, request_: SearchRequest, code: str
) -> None:
    with pytest.raises(RetrievalError) as caught:
        filled.search(request_)
    assert caught.value.code == code


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    config = RetrievalConfig.model_validate({"embedder": {"model": str(tmp_path / "nowhere")}})
    with pytest.raises(RetrievalError, match="could not be loaded"):
        RetrievalService(config, None, tmp_path)
