"""Passages that say the same as a better one."""

from __future__ import annotations

from collections.abc import Sequence

from retrieval.types import ScoredPassage

_WORDS = 5


def drop_near_duplicates(hits: Sequence[ScoredPassage], threshold: float) -> list[ScoredPassage]:
    """``hits`` without those of whose word 5-grams at least ``threshold`` stand in one better hit.

    Containment rather than similarity: a short passage that a longer one repeats adds nothing either.
    """
    kept: list[ScoredPassage] = []
    kept_shingles: list[frozenset[tuple[str, ...]]] = []
    for hit in hits:
        shingles = _shingles(hit.passage.text)
        if any(len(shingles & other) >= threshold * len(shingles) for other in kept_shingles):
            continue
        kept.append(hit)
        kept_shingles.append(shingles)
    return kept


def _shingles(text: str) -> frozenset[tuple[str, ...]]:
    words = text.lower().split()
    return frozenset(tuple(words[i : i + _WORDS]) for i in range(max(1, len(words) - _WORDS + 1)))
