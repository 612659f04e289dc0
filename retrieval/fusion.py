"""Two candidate lists into one, and what a passage's document says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

FusionKind = Literal["scores", "rrf"]
Candidates = Sequence[tuple[str, float]]
"""(chunk id, score), best first."""


@dataclass(frozen=True, slots=True)
class Lists:
    """What each way of searching found."""

    dense: Candidates = ()
    sparse: Candidates = ()

    @property
    def ids(self) -> set[str]:
        return {chunk_id for chunk_id, _ in [*self.dense, *self.sparse]}


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
    sparse_weight: float = 0.6
    document_weight: float = 1.0
    rrf_k: int = 10
    num_candidates: int = 60

    def fuse(self, found: Lists, inside: Lists | None = None) -> list[Fused]:
        """All candidates, best first; ties keep the order of the dense list.

        ``scores``: cosine plus BM25 over its best (a convex combination, Bruch et al., 2210.11934).
        ``rrf``: weighted reciprocal ranks (Cormack et al., 2009).

        A candidate that one list lacks gets that list's last score when the list was full (it scores no
        better than that), and zero when everything with a score is in the list. ``inside``: chunks that were
        searched for in one document, with their own scores; by ``rrf`` they have no rank and score nothing.
        """
        best = max((score for _, score in found.sparse), default=0.0)
        cosines, relative = dict(found.dense), _relative(found.sparse, best)
        dense_floor = self._floor(found.dense)
        sparse_floor = self._floor(found.sparse) / best if best > 0 else 0.0
        ranks = self._by_rank(found) if self.kind == "rrf" else None
        fused = []
        for chunk_id in dict.fromkeys([*cosines, *relative]):
            cosine, bm25 = cosines.get(chunk_id, dense_floor), relative.get(chunk_id, sparse_floor)
            score = self._score(cosine, bm25) if ranks is None else ranks[chunk_id]
            fused.append(Fused(chunk_id, score, cosine, bm25))
        if inside is not None:
            cosines_inside, relative_inside = dict(inside.dense), _relative(inside.sparse, best)
            for chunk_id in dict.fromkeys([*cosines_inside, *relative_inside]):
                if chunk_id not in cosines and chunk_id not in relative:
                    cosine, bm25 = cosines_inside.get(chunk_id, 0.0), relative_inside.get(chunk_id, 0.0)
                    score = self._score(cosine, bm25) if ranks is None else 0.0
                    fused.append(Fused(chunk_id, score, cosine, bm25))
        return sorted(fused, key=lambda candidate: -candidate.score)

    def lift(self, fused: Sequence[Fused], document_of: Mapping[str, str]) -> list[Fused]:
        """Each candidate with ``document_weight`` times the best score of its document added, best first.

        A passage is likelier to answer when another one of its document fits the question well, too.
        """
        best: dict[str, float] = {}
        for candidate in fused:
            document = document_of[candidate.id]
            best[document] = max(best.get(document, candidate.score), candidate.score)
        lifted = [replace(c, score=c.score + self.document_weight * best[document_of[c.id]]) for c in fused]
        return sorted(lifted, key=lambda candidate: -candidate.score)

    def _score(self, cosine: float, bm25: float) -> float:
        return self.dense_weight * cosine + self.sparse_weight * bm25

    def _by_rank(self, found: Lists) -> dict[str, float]:
        scores: dict[str, float] = {}
        for candidates, weight in ((found.dense, self.dense_weight), (found.sparse, self.sparse_weight)):
            for rank, (chunk_id, _) in enumerate(candidates):
                scores[chunk_id] = scores.get(chunk_id, 0.0) + weight / (self.rrf_k + rank + 1)
        return scores

    def _floor(self, candidates: Candidates) -> float:
        return candidates[-1][1] if len(candidates) >= self.num_candidates else 0.0


def _relative(sparse: Candidates, best: float) -> dict[str, float]:
    return {chunk_id: score / best for chunk_id, score in sparse} if best > 0 else {}
