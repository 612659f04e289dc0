"""Markers ``[n]`` in an answer, while it streams.

The text given out is the model's, except that a marker which resolves to no source is removed, and that a
finished sentence without a marker gets one for the source that supports it best (mode ``attributed``). Nothing
is held back but a marker's beginning and white space that a marker may follow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rag_service.config import CitationMode
from rag_service.prompt import PromptSource
from rag_service.sentences import sentence_ends
from rag_service.wording import content_words, stem

Origin = Literal["model", "attributed"]

_NUMBERS = r"\d{1,3}(?:\s?[,;–-]\s?\d{1,3}){0,9}"
_MARKER = re.compile(rf"[ \t]*\[({_NUMBERS})\]")
_FOLLOWING = re.compile(rf"\s*\[({_NUMBERS})\]")
_PARTIAL = re.compile(r"(?:[ \t]+|[ \t]*\[[\d\s,;–-]{0,48})\Z")
_TERMINATED = re.compile(r"""[.!?…。！？]["'”’)\]]*\s*\Z""")
_MAX_CITED = 64


@dataclass(frozen=True, slots=True)
class Citation:
    """One resolved marker. ``start`` and ``end``: its characters in the answer; when the text may not be
    altered, those of the sentence it belongs to."""

    source: PromptSource
    start: int
    end: int
    origin: Origin


class CitationStream:
    """Turns a model's text, piece by piece, into the answer's text with its citations."""

    def __init__(
        self,
        sources: Sequence[PromptSource],
        mode: CitationMode = "attributed",
        threshold: float = 0.6,
        alter: bool = True,
    ) -> None:
        self._sources = {source.index: source for source in sources}
        self._mode = mode
        self._alter = alter
        self._support = Support(sources, threshold) if mode == "attributed" else None
        self._raw = ""
        self._done = 0
        self._sentence_start = 0
        self._length = 0
        self._sentence_cited = False
        self._cut = False
        self.citations: list[Citation] = []

    def feed(self, text: str) -> str:
        """The part of the answer that ``text`` makes certain; may be empty."""
        self._raw += text
        return self._advance(final=False)

    def finish(self, cut: bool = False) -> str:
        """What is left when the model has ended. ``cut``: by its length limit, so that the last sentence is
        no finished one and is not attributed."""
        self._cut = cut
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        if self._mode == "off":
            return self._take(len(self._raw))
        pieces: list[str] = []
        while True:
            end, certain = self._next_end(final)
            if end is None or not certain:
                limit = len(self._raw) if end is None or final else end
                pieces.append(self._emit(self._safe(limit, final)))
                return "".join(pieces)
            pieces.append(self._emit(max(end, self._done)))
            pieces.append(self._close_sentence(max(end, self._done)))

    def _next_end(self, final: bool) -> tuple[int | None, bool]:
        """End of the current sentence with the markers behind it, and whether more text cannot change it."""
        if self._sentence_start >= len(self._raw):
            return None, False
        ends = sentence_ends(self._raw[self._sentence_start :], final=final)
        if not ends:
            return None, False
        end = self._sentence_start + ends[0]
        while match := _FOLLOWING.match(self._raw, end):
            end = match.end()
        rest = self._raw[end:]
        undecided = not rest.strip() or _PARTIAL.match(rest.lstrip()) is not None
        return end, final or not undecided

    def _safe(self, limit: int, final: bool) -> int:
        partial = None if final else _PARTIAL.search(self._raw, self._done, limit)
        return max(partial.start() if partial else limit, self._done)

    def _emit(self, limit: int) -> str:
        """Give out the raw text up to ``limit``, with the model's markers resolved."""
        pieces: list[str] = []
        for match in _MARKER.finditer(self._raw, self._done, limit):
            if self._in_code(match.start()) or match.start() < self._done:
                continue
            bracket = self._raw.index("[", match.start())
            attached = bracket > 0 and (self._raw[bracket - 1].isalnum() or self._raw[bracket - 1] == "_")
            known = [number for number in _expanded(match.group(1)) if number in self._sources]
            if not known and (attached or not self._alter):
                continue  # argv[7] is code, no citation
            pieces.append(self._take(bracket if known else match.start()))
            pieces.append(self._model_marker(match.group(0).lstrip(), known))
            self._done = match.end()
        pieces.append(self._take(limit))
        return "".join(pieces)

    def _model_marker(self, text: str, known: Sequence[int]) -> str:
        if self._alter:
            parts = [self._mark(f"[{number}]", number, "model") for number in known]
            return "".join(parts)
        start = self._length
        self._length += len(text)
        for number in known:
            self._cite(number, start, self._length, "model")
        return text

    def _close_sentence(self, end: int) -> str:
        sentence = self._raw[self._sentence_start : end]
        start, self._sentence_start = self._sentence_start, end
        cited, self._sentence_cited = self._sentence_cited, False
        unfinished = self._cut and not self._raw[end:].strip() and not _TERMINATED.search(sentence)
        if self._support is None or cited or unfinished or self._in_code(end):
            return ""
        number = self._support.best(_MARKER.sub("", sentence))
        if number is None:
            return ""
        if self._alter:
            self._length += 1
            return " " + self._mark(f"[{number}]", number, "attributed", of_sentence=False)
        visible = len(sentence) - len(sentence.lstrip())
        self._cite(number, start + visible, end, "attributed", of_sentence=False)
        return ""

    def _mark(self, marker: str, number: int, origin: Origin, of_sentence: bool = True) -> str:
        start = self._length
        self._length += len(marker)
        self._cite(number, start, self._length, origin, of_sentence)
        return marker

    def _cite(self, number: int, start: int, end: int, origin: Origin, of_sentence: bool = True) -> None:
        self._sentence_cited = self._sentence_cited or of_sentence
        if len(self.citations) < _MAX_CITED:
            self.citations.append(Citation(self._sources[number], start, end, origin))

    def _take(self, limit: int) -> str:
        text = self._raw[self._done : limit]
        self._done = max(limit, self._done)
        self._length += len(text)
        return text

    def _in_code(self, position: int) -> bool:
        return self._raw.count("`", 0, position) % 2 == 1


def without_markers(text: str) -> str:
    """``text`` without the markers ``[n]`` in it."""
    return _MARKER.sub("", text)


class Support:
    """Which source supports a sentence: the share of its content words that the source contains."""

    def __init__(self, sources: Sequence[PromptSource], threshold: float) -> None:
        self._threshold = threshold
        self._texts = {
            source.index: [stem(word) for word in content_words(f"{source.title}\n{source.text}")]
            for source in sources
        }
        self._words = {index: frozenset(stems) for index, stems in self._texts.items()}
        self._pairs = {index: frozenset(pairwise(stems)) for index, stems in self._texts.items()}

    def best(self, sentence: str) -> int | None:
        """The number of the best source at or above the threshold, or None.

        A sentence of fewer than two content words says nothing to support; a number that a source lacks is
        not supported by it, however many words fit. Equal shares are told apart by word pairs, then by rank.
        """
        stems = [stem(word) for word in content_words(sentence)]
        if len(stems) < 2:
            return None
        numbers = {word for word in stems if word[0].isdigit()}
        counts, pairs = Counter(stems), list(pairwise(stems))
        ranked = [
            (
                sum(count for word, count in counts.items() if word in self._words[index]) / len(stems),
                sum(pair in self._pairs[index] for pair in pairs),
                -index,
            )
            for index in self._texts
            if numbers <= self._words[index]
        ]
        share, _, negative = max(ranked, default=(0.0, 0, 0))
        return -negative if share >= self._threshold and share > 0 else None


def _expanded(numbers: str) -> list[int]:
    """``1, 3-5`` → [1, 3, 4, 5]; without repetition."""
    result: list[int] = []
    for part in re.split(r"\s?[,;]\s?", numbers):
        bounds = [int(number) for number in re.split(r"\s?[–-]\s?", part)]
        result.extend(range(bounds[0], min(bounds[-1], bounds[0] + 20) + 1))
    return list(dict.fromkeys(result))
