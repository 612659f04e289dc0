"""Both engines keep the same promises: atomic replacement, tenants apart, filters, pages."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from qdrant_client import QdrantClient

from retrieval.fusion import Fusion
from retrieval.index.edge import EdgeIndex
from retrieval.index.record import Index, IndexQuery, SparseVector
from retrieval.index.server import ServerIndex
from retrieval.types import RetrievalError
from tests.retrieval.kills import killed_in_between, killed_while_writing
from tests.retrieval.stored import make_document


@pytest.fixture(params=["edge", "server"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Index]:
    made: Index
    if request.param == "edge":
        made = EdgeIndex(tmp_path / "index", 4)
    else:
        with warnings.catch_warnings():
            # No server here: the client's local mode takes the same calls but has no payload indexes.
            warnings.simplefilter("ignore", UserWarning)
            made = ServerIndex(QdrantClient(":memory:"), "test", 4)
    yield made
    made.close()


def query(tenant: str = "acme", **options: object) -> IndexQuery:
    vector = np.array([1.0, 0.2, 0.1, 0.0], dtype=np.float32)
    fusion = Fusion(num_candidates=50)
    return IndexQuery(tenant, vector, SparseVector((1, 2), (1.0, 1.0)), 50, fusion, **options)  # type: ignore[arg-type]


def texts(index: Index, tenant: str = "acme", **options: object) -> set[str]:
    return {hit.passage.text for hit in index.search(query(tenant, **options))}


def test_replacing_by_a_shorter_version_leaves_nothing_of_the_old_one(index: Index) -> None:
    index.replace(make_document(version="v1", num_chunks=5))
    index.replace(make_document(version="v2", num_chunks=2))
    assert texts(index) == {"text v2 0", "text v2 1"}
    assert index.count() == 2
    assert index.version("acme", "d") == "v2"
    assert [p.metadata["chunk_index"] for p in index.passages("acme", "d")] == [0, 1]


def test_writing_the_same_version_again_changes_nothing(index: Index) -> None:
    for _ in range(2):
        index.replace(make_document(num_chunks=3))
    assert index.count() == 3
    assert len(texts(index)) == 3


def test_delete_removes_everything_and_only_of_the_tenant(index: Index) -> None:
    index.replace(make_document(tenant="acme"))
    index.replace(make_document(tenant="globex"))
    assert not index.delete("initech", "d")
    assert index.delete("acme", "d")
    assert texts(index, "acme") == set()
    assert texts(index, "globex") == {"text v1 0", "text v1 1"}
    assert not index.delete("acme", "d")


def test_no_call_crosses_tenants(index: Index) -> None:
    secret = make_document("secret", tenant="globex", text="secret", metadata={"owner": "globex"})
    index.replace(secret)
    index.replace(make_document("own", tenant="acme"))
    assert texts(index, document_ids=("secret",)) == set()
    for filters in ({"tenant": "globex"}, {"owner": "globex"}, {"meta.tenant": "globex"}, {"tags": "x"}):
        assert texts(index, filters=filters) == set()
    assert index.document("acme", "secret") is None
    assert index.passages("acme", "secret") == []
    assert index.text("acme", "secret") == ""
    assert index.version("acme", "secret") is None
    assert [info.id for info in index.documents("acme", None, 10, None)[0]] == ["own"]


def test_other_tenants_documents_do_not_change_scores(index: Index) -> None:
    index.replace(make_document(tenant="acme"))
    before = [hit.score for hit in index.search(query())]
    for number in range(5):
        index.replace(make_document(f"other-{number}", tenant="globex"))
    assert [hit.score for hit in index.search(query())] == pytest.approx(before)


def test_filters_by_domain_document_and_metadata(index: Index) -> None:
    index.replace(make_document("a", domain="legal", text="a", metadata={"year": 2020, "draft": True}))
    index.replace(make_document("b", domain="finance", text="b", metadata={"year": 2021, "tags": ["x", "y"]}))
    assert texts(index, domain="finance") == {"b v1 0", "b v1 1"}
    assert texts(index, document_ids=("a",)) == {"a v1 0", "a v1 1"}
    assert texts(index, filters={"year": [2019, 2020]}) == {"a v1 0", "a v1 1"}
    assert texts(index, filters={"draft": True}) == {"a v1 0", "a v1 1"}
    assert texts(index, filters={"draft": 1}) == set()
    assert texts(index, filters={"tags": "y"}) == {"b v1 0", "b v1 1"}
    assert texts(index, filters={"year": 2020, "tags": "y"}) == set()
    with pytest.raises(RetrievalError, match="year"):
        texts(index, filters={"year": {"gt": 1}})


def test_the_best_passages_document_is_opened_and_lifts_the_others(index: Index) -> None:
    index.replace(make_document("other", text="other", num_chunks=3))
    index.replace(make_document("best", text="best", num_chunks=4))
    vector = np.array([0.0, 0.1, 0.2, 1.0], dtype=np.float32)

    def found(document_weight: float) -> list[str]:
        fusion = Fusion(num_candidates=2, sparse_weight=0.1, document_weight=document_weight)
        asked = IndexQuery("acme", vector, SparseVector((4,), (1.0,)), 10, fusion)
        return [hit.passage.text for hit in index.search(asked)]

    plain = found(0.0)
    assert plain[0] == "best v1 3"
    assert len(plain) == 2
    lifted = found(1.0)
    assert lifted[:2] == ["best v1 3", "best v1 2"]
    assert set(plain) < {*lifted, "other v1 2"}
    assert texts(index, document_ids=("other",)) == {f"other v1 {i}" for i in range(3)}


def test_pages_of_documents_cover_each_document_once(index: Index) -> None:
    for number in range(7):
        index.replace(make_document(f"d{number}"))
    seen: list[str] = []
    offset: str | None = None
    while True:
        page, offset = index.documents("acme", None, 3, offset)
        seen += [info.id for info in page]
        if offset is None:
            break
    assert sorted(seen) == [f"d{number}" for number in range(7)]


def test_stored_documents_come_back_whole(index: Index) -> None:
    index.replace(make_document(text="the whole text", metadata={"page_starts": [0, 4], "author": "Kim"}))
    sources, following = index.sources(10, None)
    assert following is None
    assert sources[0]["text"] == "the whole text"
    assert sources[0]["metadata"] == {"page_starts": [0, 4], "author": "Kim"}
    assert index.passages("acme", "d")[1].metadata["page"] == 2


def test_readers_see_one_whole_version_while_writers_race(index: Index) -> None:
    index.replace(make_document(version="v0", num_chunks=6))
    stop = threading.Event()
    torn: list[set[str]] = []

    def read() -> None:
        while not stop.is_set():
            found = texts(index)
            if len({text.split()[1] for text in found}) != 1:
                torn.append(found)

    def write(names: list[str]) -> None:
        for name in names:
            index.replace(make_document(version=name, num_chunks=2 if name.endswith("0") else 6))

    if isinstance(index, ServerIndex):
        pytest.skip("the client's local mode is not safe to call from several threads")
    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=([f"{w}{i}" for i in range(8)],)) for w in "xy"]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert torn == []
    assert len({text.split()[1] for text in texts(index)}) == 1


@pytest.mark.parametrize("when", ["before going live", "before removal"])
def test_a_hard_kill_in_mid_replacement_leaves_one_whole_version(tmp_path: Path, when: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=killed_in_between, args=(tmp_path, when))
    process.start()
    process.join()
    assert process.exitcode == 9
    index = EdgeIndex(tmp_path, 4)
    assert texts(index) == {"text v2 0", "text v2 1"}
    assert index.count() == 2
    index.close()


def test_a_hard_kill_before_the_new_version_is_whole_leaves_the_old_one(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=killed_while_writing, args=(tmp_path,))
    process.start()
    process.join()
    index = EdgeIndex(tmp_path, 4)
    assert len(texts(index)) == 3
    assert index.version("acme", "d") == "v1"
    index.close()


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    index = EdgeIndex(tmp_path, 4)
    with pytest.raises(RetrievalError, match="in use by another process") as caught:
        EdgeIndex(tmp_path, 4)
    assert caught.value.code == "index_locked"
    index.close()
    EdgeIndex(tmp_path, 4).close()
