"""Two candidate lists into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FusionKind = Literal["scores", "rrf"]
Candidates = Sequence[tuple[str, float]]
"""(chunk id, score), best first."""


@dataclass(frozen=True, slots=True)
class Fused:
    """One candidate: its fused score, its cosine, and its BM25 over the best one's."""

    id: str
    score: float
    cosine: float
    bm25: float

    @property
    def scores(self) -> tuple[float, float, float]:
        return self.score, self.cosine, self.bm25


@dataclass(frozen=True, slots=True)
class Fusion:
    """How lists are fused. ``num_candidates``: how long each list was allowed to be."""

    kind: FusionKind = "scores"
    dense_weight: float = 1.0
    sparse_weight: float = 0.5
    rrf_k: int = 10
    num_candidates: int = 60

    def fuse(self, dense: Candidates, sparse: Candidates) -> list[Fused]:
        """All candidates, best first; ties keep the order of the dense list.

        ``scores``: cosine plus BM25 over its best (a convex combination, Bruch et al., 2210.11934).
        ``rrf``: weighted reciprocal ranks (Cormack et al., 2009).

        A candidate that one list lacks gets that list's last score when the list was full (it scores no
        better than that), and zero when everything with a score is in the list.
        """
        best = max((score for _, score in sparse), default=0.0)
        cosines = dict(dense)
        relative = {chunk_id: score / best for chunk_id, score in sparse} if best > 0 else {}
        dense_floor = self._floor(dense)
        sparse_floor = self._floor(sparse) / best if best > 0 else 0.0
        ranks = self._by_rank(dense, sparse) if self.kind == "rrf" else {}
        fused = []
        for chunk_id in dict.fromkeys([*cosines, *relative]):
            cosine, bm25 = cosines.get(chunk_id, dense_floor), relative.get(chunk_id, sparse_floor)
            score = ranks.get(chunk_id, self.dense_weight * cosine + self.sparse_weight * bm25)
            fused.append(Fused(chunk_id, score, cosine, bm25))
        return sorted(fused, key=lambda candidate: -candidate.score)

    def _by_rank(self, dense: Candidates, sparse: Candidates) -> dict[str, float]:
        scores: dict[str, float] = {}
        for candidates, weight in ((dense, self.dense_weight), (sparse, self.sparse_weight)):
            for rank, (chunk_id, _) in enumerate(candidates):
                scores[chunk_id] = scores.get(chunk_id, 0.0) + weight / (self.rrf_k + rank + 1)
        return scores

    def _floor(self, candidates: Candidates) -> float:
        return candidates[-1][1] if len(candidates) >= self.num_candidates else 0.0
