"""How good answers are, judged by their text alone: citations, references, support by the sources."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rag_service.sentences import split_sentences

_MARKER = re.compile(r"\[(\d{1,3})\]")
_LEADING_MARKERS = re.compile(r"(\s*\[\d{1,3}\])+")
_WORD = re.compile(r"\w+")
_STOP_LIST = (
    "a an and are as at be been but by can do does for from had has have how in is it its may not of on or "
    "our that the their they this to was we were what when which who will with you your"
)
_STOP_WORDS = frozenset(_STOP_LIST.split())


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer with the texts of its sources and, where known, reference answers."""

    domain: str
    answer: str
    sources: Sequence[str]
    references: Sequence[str] = ()


def summarise(answers: Sequence[Asked]) -> dict[str, dict[str, Any]]:
    """Figures by domain and for ``all``; None where nothing could be measured.

    ``cited``: answers with a citation. ``citation_validity``: markers that name a source, of all markers.
    ``citation_support``: content words of a cited sentence that stand in the very source cited.
    ``overlap_f1``: word F1 with the best reference (as SQuAD counts it). ``supported``: content words of the
    answer that stand in one of its sources.
    """
    groups: dict[str, list[Asked]] = defaultdict(list)
    for answer in answers:
        groups[answer.domain].append(answer)
    groups["all"] = list(answers)
    return {domain: _figures(group) for domain, group in groups.items()}


def overlap_f1(answer: str, references: Sequence[str]) -> float | None:
    """Harmonic mean of word precision and recall with the best reference; None without references."""
    return max((_f1(_words(answer), _words(reference)) for reference in references), default=None)


def supported(answer: str, sources: Sequence[str]) -> float | None:
    """The part of the answer's content words that its sources have; None for an answer without any."""
    words = [word for word in _words(answer) if word not in _STOP_WORDS]
    known = {word for source in sources for word in _words(source)}
    return fmean(word in known for word in words) if words else None


def _figures(answers: Sequence[Asked]) -> dict[str, Any]:
    markers = [(int(number), len(a.sources)) for a in answers for number in _MARKER.findall(a.answer)]
    overlaps = [overlap_f1(answer.answer, answer.references) for answer in answers]
    supports = [supported(answer.answer, answer.sources) for answer in answers]
    return {
        "num_answers": len(answers),
        "cited": _mean([bool(_MARKER.search(answer.answer)) for answer in answers]),
        "citation_validity": _mean([1 <= number <= available for number, available in markers]),
        "citation_support": _mean([value for answer in answers for value in _citation_supports(answer)]),
        "overlap_f1": _mean(overlaps),
        "supported": _mean(supports),
    }


def _citation_supports(answer: Asked) -> list[float | None]:
    """For each marker that names a source: how much of the sentence before it that source has."""
    return [
        supported(sentence, [answer.sources[int(number) - 1]])
        for sentence in _cited_sentences(answer.answer)
        for number in _MARKER.findall(sentence)
        if 1 <= int(number) <= len(answer.sources)
    ]


def _cited_sentences(text: str) -> list[str]:
    """Sentences with the markers that follow their full stop."""
    sentences: list[str] = []
    for sentence in split_sentences(text):
        leading = _LEADING_MARKERS.match(sentence)
        if leading and sentences:
            sentences[-1] += leading[0]
            sentence = sentence[leading.end() :]
        sentences.append(sentence)
    return [sentence for sentence in sentences if _MARKER.search(sentence)]


def _mean(values: Sequence[float | bool | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None


def _words(text: str) -> list[str]:
    return _WORD.findall(_MARKER.sub(" ", text).lower())


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    shared = sum((Counter(answer) & Counter(reference)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)
