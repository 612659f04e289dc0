from __future__ import annotations

import pytest

from retrieval.fusion import Fusion, Lists

DENSE = [("a", 0.9), ("b", 0.8), ("c", 0.1)]
SPARSE = [("b", 20.0), ("d", 10.0)]
FOUND = Lists(DENSE, SPARSE)


def test_scores_add_cosine_and_relative_bm25() -> None:
    fused = {f.id: f for f in Fusion(sparse_weight=0.5, num_candidates=60).fuse(FOUND)}
    assert fused["b"].scores == pytest.approx((0.8 + 0.5, 0.8, 1.0))
    assert fused["a"].score == pytest.approx(0.9)
    assert fused["d"].score == pytest.approx(0.25)


def test_a_full_list_gives_its_last_score_to_what_it_lacks() -> None:
    fused = {f.id: f for f in Fusion(num_candidates=2).fuse(Lists(DENSE[:2], SPARSE))}
    assert fused["d"].cosine == pytest.approx(0.8)
    assert fused["a"].bm25 == pytest.approx(0.5)


def test_reciprocal_ranks() -> None:
    fusion = Fusion("rrf", dense_weight=1.0, sparse_weight=2.0, rrf_k=10)
    fused = {f.id: f.score for f in fusion.fuse(FOUND, Lists([("z", 0.5)]))}
    assert fused["b"] == pytest.approx(1 / 12 + 2 / 11)
    assert fused["d"] == pytest.approx(2 / 12)
    assert fused["z"] == 0.0


def test_one_list_alone_and_none() -> None:
    assert [f.id for f in Fusion().fuse(Lists(DENSE))] == ["a", "b", "c"]
    assert [f.id for f in Fusion().fuse(Lists(sparse=SPARSE))] == ["b", "d"]
    assert Fusion().fuse(Lists()) == []


def test_chunks_searched_for_inside_a_document_count_their_own_scores() -> None:
    inside = Lists([("a", 0.9), ("e", 0.3)], [("e", 5.0), ("f", 4.0)])
    fused = {f.id: f for f in Fusion(sparse_weight=0.5, num_candidates=2).fuse(FOUND, inside)}
    assert fused["e"].scores == pytest.approx((0.3 + 0.5 * 0.25, 0.3, 0.25))
    assert fused["f"].scores == pytest.approx((0.5 * 0.2, 0.0, 0.2))
    assert fused["a"].bm25 == pytest.approx(0.5)


def test_a_document_lifts_its_passages() -> None:
    fusion = Fusion(sparse_weight=0.5, document_weight=1.0)
    document_of = {"a": "one", "b": "two", "c": "two", "d": "three"}
    lifted = {f.id: f.score for f in fusion.lift(fusion.fuse(FOUND), document_of)}
    assert lifted == pytest.approx({"a": 1.8, "b": 2.6, "c": 0.1 + 1.3, "d": 0.5})
    assert [f.id for f in fusion.lift(fusion.fuse(FOUND), document_of)] == ["b", "a", "c", "d"]
