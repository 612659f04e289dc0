from __future__ import annotations

import pytest

from retrieval.fusion import Fusion

DENSE = [("a", 0.9), ("b", 0.8), ("c", 0.1)]
SPARSE = [("b", 20.0), ("d", 10.0)]


def test_scores_add_cosine_and_relative_bm25() -> None:
    fused = {f.id: f for f in Fusion(sparse_weight=0.5, num_candidates=60).fuse(DENSE, SPARSE)}
    assert fused["b"].scores == pytest.approx((0.8 + 0.5, 0.8, 1.0))
    assert fused["a"].score == pytest.approx(0.9)
    assert fused["d"].score == pytest.approx(0.25)


def test_a_full_list_gives_its_last_score_to_what_it_lacks() -> None:
    fused = {f.id: f for f in Fusion(num_candidates=2).fuse(DENSE[:2], SPARSE)}
    assert fused["d"].cosine == pytest.approx(0.8)
    assert fused["a"].bm25 == pytest.approx(0.5)


def test_reciprocal_ranks() -> None:
    fusion = Fusion("rrf", dense_weight=1.0, sparse_weight=2.0, rrf_k=10)
    fused = {f.id: f.score for f in fusion.fuse(DENSE, SPARSE)}
    assert fused["b"] == pytest.approx(1 / 12 + 2 / 11)
    assert fused["d"] == pytest.approx(2 / 12)


def test_one_list_alone_and_none() -> None:
    assert [f.id for f in Fusion().fuse(DENSE, [])] == ["a", "b", "c"]
    assert [f.id for f in Fusion().fuse([], SPARSE)] == ["b", "d"]
    assert Fusion().fuse([], []) == []
