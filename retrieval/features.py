"""What the learned reranker looks at: how a query's tokens and words meet a passage's.

Every feature is general form, none knows a domain: similarity of meaning (late interaction, first-stage
scores), wording (rare tokens, pairs and words that recur, also in the first line and in the title), and what
the other candidates say (a document that several of them come from).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from retrieval.embedder import Encoding
from retrieval.token_vectors import FloatArray, IntArray, TokenVectors, normalise, pool
from retrieval.types import Passage

FEATURES = (
    "fused", "cosine", "bm25",
    "late", "late_plain", "late_rarest",
    "tokens", "tokens_context", "tokens_opening", "tokens_body", "pairs", "pairs_opening", "bm25_body",
    "length", "place", "siblings_best", "siblings",
    "words", "words_any_case", "words_first_line", "rarest_first_line", "rarest", "rarest_count",
    "rarest_early", "second", "words_heading",
)  # fmt: skip
"""Names of the columns, in order."""

_WORD = re.compile(r"\w+(?:[._]\w+)*")
_SPLIT = re.compile(r"[._]")
_OPENING_TOKENS = 20
_FIRST_LINE = 200
_TYPICAL_TOKENS = 130.0
_NO_SIBLING = 0.1
"""How far below the worst candidate a passage without siblings is put."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query ready to be compared. ``rarity`` ``[n]`` of its tokens; ``words`` with their weights, rarest
    first."""

    vectors: FloatArray
    ids: IntArray
    rarity: FloatArray
    words: Mapping[str, float]


class FeatureExtractor:
    """Makes token vectors for storage and features for ranking, from one projection and one rarity table."""

    def __init__(self, projection: FloatArray, idf: FloatArray, pooling: int, tokenizer: Tokenizer) -> None:
        """``projection`` ``[hidden, dimension]``; ``idf`` ``[vocabulary]``: the rarity of each token."""
        self.projection = projection
        self.idf = idf
        self.pooling = pooling
        self._tokenizer = tokenizer

    def passage(self, encoding: Encoding, num_context: int) -> TokenVectors:
        """What is stored with a chunk whose indexed text ``encoding`` is of."""
        projected = normalise(encoding.tokens @ self.projection)
        return TokenVectors(
            normalise(pool(projected, self.pooling)),
            encoding.token_ids,
            min(num_context, len(encoding.token_ids)),
        )

    def query(self, text: str, encoding: Encoding) -> Query:
        words: dict[str, float] = {}
        for match in _WORD.finditer(text):
            ids = self._tokenizer.encode(match[0], add_special_tokens=False).ids
            if ids:
                # A word in many pieces is rarer than its pieces are.
                words[match[0]] = float(self.idf[ids].max()) + len(ids) - 1
        return Query(
            vectors=normalise(encoding.tokens @ self.projection),
            ids=encoding.token_ids,
            rarity=self.idf[encoding.token_ids],
            words=dict(sorted(words.items(), key=lambda item: -item[1])),
        )

    def features(
        self, query: Query, passages: Sequence[Passage], tokens: Sequence[TokenVectors]
    ) -> FloatArray:
        """``[len(passages), len(FEATURES)]``; the passages are all the candidates of one query."""
        rows = [
            [
                *_first_stage(passage),
                *_late(query, stored),
                *_lexical(query, stored, self.idf),
                np.log(max(1, len(stored.ids))),
                np.log1p(int(passage.metadata.get("chunk_index", 0))),
                *siblings,
                *_words(query, passage),
            ]
            for passage, stored, siblings in zip(passages, tokens, _siblings(passages), strict=True)
        ]
        return np.asarray(rows, dtype=np.float32).reshape(len(rows), len(FEATURES))


def _first_stage(passage: Passage) -> tuple[float, float, float]:
    if len(passage.retrieval_scores) != 3:
        return 0.0, 0.0, 0.0
    fused, cosine, bm25 = passage.retrieval_scores
    return fused, cosine, bm25


def _late(query: Query, stored: TokenVectors) -> tuple[float, float, float]:
    """Weighted and plain mean of each query token's best match, and that of the three weightiest matches."""
    if not len(query.vectors) or not len(stored.vectors):
        return 0.0, 0.0, 0.0
    best = (query.vectors @ stored.vectors.T).max(axis=1)
    weighted = best * query.rarity
    return (
        float(weighted.sum() / max(1e-9, float(query.rarity.sum()))),
        float(best.mean()),
        float(np.sort(weighted)[:3].mean()),
    )


def _lexical(query: Query, stored: TokenVectors, idf: FloatArray) -> list[float]:
    """Rarity-weighted parts of the query's tokens, and of its pairs of neighbours, that the passage has."""
    ids, context = stored.ids.tolist(), stored.num_context
    body, opening = ids[context:], ids[context : context + _OPENING_TOKENS]
    wanted = query.ids.tolist()
    rarity = query.rarity.tolist()
    total = sum(rarity) + 1e-9
    pairs = list(pairwise(wanted))
    pair_rarity = [first + second for first, second in pairwise(rarity)]
    pair_total = sum(pair_rarity) + 1e-9
    counts = Counter(body)

    def part(present: set[int]) -> float:
        return float(sum(r for r, token in zip(rarity, wanted, strict=True) if token in present) / total)

    def pair_part(tokens: list[int]) -> float:
        present = set(pairwise(tokens))
        return float(
            sum(r for r, pair in zip(pair_rarity, pairs, strict=True) if pair in present) / pair_total
        )

    damping = 1.2 * (0.25 + 0.75 * len(body) / _TYPICAL_TOKENS)
    bm25 = sum(
        r * counts[token] * 2.2 / (counts[token] + damping)
        for r, token in zip(rarity, wanted, strict=True)
        if counts[token]
    )
    return [
        part(set(ids)),
        part(set(ids[:context])),
        part(set(opening)),
        part(set(body)),
        pair_part(ids),
        pair_part(opening),
        float(bm25 / total),
    ]


def _siblings(passages: Sequence[Passage]) -> list[tuple[float, float]]:
    """For each passage the best first-stage score of another one of its document, and how many there are."""
    scores = [_first_stage(passage)[0] for passage in passages]
    lowest = min(scores, default=0.0) - _NO_SIBLING
    result = []
    for i, passage in enumerate(passages):
        others = [
            scores[j]
            for j, other in enumerate(passages)
            if j != i and other.document_id == passage.document_id
        ]
        result.append((max(others, default=lowest), len(others) / 10.0))
    return result


def _words(query: Query, passage: Passage) -> list[float]:
    """As for tokens, by whole words as written; and where the query's rarest word stands."""
    text = passage.text
    heading = f"{passage.metadata.get('title') or ''} {passage.metadata.get('section') or ''}".lower()
    found = [match[0] for match in _WORD.finditer(text)]
    counts = Counter(found)
    present = _with_parts(counts)
    lowered = {word.lower() for word in present}
    first_line = _with_parts(match[0] for match in _WORD.finditer(text.split("\n", 1)[0][:_FIRST_LINE]))
    total = sum(query.words.values()) + 1e-9
    ranked = list(query.words)
    rarest = ranked[0] if ranked else ""
    second = ranked[1] if len(ranked) > 1 else rarest
    return [
        sum(weight for word, weight in query.words.items() if word in present) / total,
        sum(weight for word, weight in query.words.items() if word.lower() in lowered) / total,
        sum(weight for word, weight in query.words.items() if word in first_line) / total,
        float(rarest in first_line),
        float(rarest in present),
        float(np.log1p(counts[rarest])),
        1.0 / (1 + found.index(rarest)) if counts[rarest] else 0.0,
        float(second in present),
        sum(weight for word, weight in query.words.items() if word.lower() in heading) / total,
    ]


def _with_parts(words: Iterable[str]) -> set[str]:
    """Words and the parts of dotted and underscored ones."""
    return {part for word in set(words) for part in (word, *_SPLIT.split(word)) if part}


def inverse_document_frequencies(token_ids: Sequence[npt.NDArray[np.int64]], vocabulary: int) -> FloatArray:
    """``[vocabulary]``: log of how rare each token is among the given texts; unseen tokens count as rarest."""
    frequencies = np.zeros(vocabulary, dtype=np.int64)
    for ids in token_ids:
        frequencies[np.unique(ids)] += 1
    rare = np.log1p((len(token_ids) - frequencies + 0.5) / (frequencies + 0.5))
    return rare.astype(np.float32)


def principal_axes(tokens: FloatArray, dimension: int) -> FloatArray:
    """``[hidden, dimension]``: the directions in which token vectors ``[n, hidden]`` differ most."""
    unit = normalise(tokens)
    _, axes = np.linalg.eigh(unit.T @ unit)
    return np.ascontiguousarray(axes[:, ::-1][:, :dimension]).astype(np.float32)
