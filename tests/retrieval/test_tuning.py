from __future__ import annotations

from retrieval.config import RetrievalConfig
from retrieval.tuning import Trial, fastest_equal, frontier, with_chunking


def trial(ndcg: float, milliseconds: float, depth: int = 0) -> Trial:
    return Trial(224, depth, ndcg, 0.9, milliseconds / 1000, milliseconds / 500, 9000)


def test_the_frontier_leaves_out_what_another_beats_in_both() -> None:
    fast, good, beaten, slow = trial(0.7, 10), trial(0.8, 20), trial(0.75, 25), trial(0.8, 30)
    assert frontier([fast, good, beaten, slow]) == [fast, good]


def test_the_fastest_of_equal_quality() -> None:
    best, equal, worse = trial(0.800, 40), trial(0.797, 25), trial(0.790, 10)
    assert fastest_equal([worse, best, equal]) == (best, equal)


def test_overlap_follows_the_chunk_size() -> None:
    assert with_chunking(RetrievalConfig(), 112).chunking.overlap_tokens == 12
