"""BM25 term weights, made here so that embedded and served indexes rank alike."""

from __future__ import annotations

import re

import qdrant_edge as edge

from retrieval.index.record import SparseVector

_COMPOUND = re.compile(r"[A-Za-z0-9]+(?:[._][A-Za-z0-9]+)+|[a-z]+(?:[A-Z][a-z0-9]+)+|(?:[A-Z][a-z0-9]+){2,}")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")


class Bm25Encoder:
    """Texts to sparse vectors; inverse document frequencies are the index's business.

    Identifiers (``read_text``, ``Path.open``, ``DataFrame``) count both whole and by their parts.
    """

    def __init__(self, average_length: float = 128.0, language: str = "english") -> None:
        self._model = edge.Bm25(
            edge.Bm25Config(language=language, avg_len=average_length, ascii_folding=True)
        )

    def document(self, text: str) -> SparseVector:
        vector = self._model.embed_document(expand(text))
        return SparseVector(tuple(vector.indices), tuple(vector.values))

    def query(self, text: str) -> SparseVector:
        vector = self._model.embed_query(expand(text))
        return SparseVector(tuple(vector.indices), tuple(vector.values))


def expand(text: str) -> str:
    """``text`` with every compound identifier followed by what the tokenizer would not make of it."""

    def both(match: re.Match[str]) -> str:
        whole = match[0]
        parts = [part for piece in re.split(r"[._]", whole) for part in _CAMEL.findall(piece)]
        joined = re.sub(r"[._]", "", whole)
        return " ".join(dict.fromkeys([joined, *parts]))

    return _COMPOUND.sub(both, text)
