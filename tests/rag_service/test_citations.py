"""Markers in a streamed answer: resolved, removed, attributed; the same however the text is cut up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.citations import CitationStream, Support
from rag_service.config import CitationMode
from rag_service.prompt import PromptSource
from retrieval.types import Passage

SOURCES = (
    PromptSource(
        1, Passage("a", "a#0", "", {"title": "Library"}), 1.0, "The library opens at nine on weekdays."
    ),
    PromptSource(2, Passage("b", "b#0", ""), 0.5, "Members may borrow six books for 30 days."),
)


def _run(
    text: str, cuts: tuple[int, ...] = (), mode: CitationMode = "attributed", alter: bool = True
) -> tuple[str, list[tuple[int, str, str]], list[str]]:
    stream = CitationStream(SOURCES, mode, 0.6, alter)
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [stream.feed(text[start:end]) for start, end in pairwise(bounds)]
    pieces.append(stream.finish())
    out = "".join(pieces)
    return out, [(c.source.index, out[c.start : c.end], c.origin) for c in stream.citations], pieces


@pytest.mark.parametrize(
    ("text", "out", "cited"),
    [
        (
            "It opens at nine on weekdays. Members may borrow six books.",
            "It opens at nine on weekdays. [1] Members may borrow six books. [2]",
            [(1, "[1]", "attributed"), (2, "[2]", "attributed")],
        ),
        ("It opens at nine [1].", "It opens at nine [1].", [(1, "[1]", "model")]),
        ("It opens at nine. [1] So.", "It opens at nine. [1] So.", [(1, "[1]", "model")]),
        ("Cooking is fun [7].", "Cooking is fun.", []),
        ("Both say so [1, 2].", "Both say so [1][2].", [(1, "[1]", "model"), (2, "[2]", "model")]),
        ("Both say so [1-2].", "Both say so [1][2].", [(1, "[1]", "model"), (2, "[2]", "model")]),
        ("Take argv[7] and `x [1]` here.", "Take argv[7] and `x [1]` here.", []),
        ("Members may borrow nine books.", "Members may borrow nine books. [2]", [(2, "[2]", "attributed")]),
        ("Members may borrow 9 books.", "Members may borrow 9 books.", []),
        ("Yes. The moon is made of cheese.", "Yes. The moon is made of cheese.", []),
        ("An open [", "An open [", []),
        ("", "", []),
    ],
)
def test_whole_texts(text: str, out: str, cited: list[tuple[int, str, str]]) -> None:
    assert _run(text)[:2] == (out, cited)


def test_unaltered_text_is_annotated_by_sentence() -> None:
    text = "It opens at nine on weekdays. Cooking is fun [7]. Six books [2]."
    out, cited, _ = _run(text, alter=False)
    assert out == text
    assert cited == [(1, "It opens at nine on weekdays.", "attributed"), (2, "[2]", "model")]


def test_a_sentence_cut_off_by_the_length_limit_is_not_attributed() -> None:
    for text, out in (
        ("It opens at nine on weekdays. Members may borrow six", " [1] Members may borrow six"),
        ("It opens at nine on weekdays.", " [1]"),
    ):
        stream = CitationStream(SOURCES)
        given_out = stream.feed(text) + stream.finish(cut=True)
        assert given_out == "It opens at nine on weekdays." + out


def test_modes() -> None:
    text = "It opens at nine on weekdays. Six books [2][9]."
    assert _run(text, mode="model")[0] == "It opens at nine on weekdays. Six books [2]."
    assert _run(text, mode="off") == (text, [], [text, ""])


def test_nothing_is_held_back_but_a_marker_and_the_white_space_before_it() -> None:
    stream = CitationStream(SOURCES, "attributed", 0.6)
    given_out = [
        stream.feed(piece) for piece in ("It opens at nine", " on weekdays", ".", " ", "Mem", "bers [", "2")
    ]
    assert given_out == ["It opens at nine", " on weekdays", ".", "", " [1] Mem", "bers", ""]
    assert stream.feed("].") == " [2]."


PARTS = (
    "The library opens at nine",
    " on weekdays",
    ".",
    " ",
    "\n",
    "[1]",
    " [2]",
    "[9]",
    "[1, 2]",
    "[",
    "]",
    "`",
)
MORE_PARTS = ("x[3]", "e.g.", " six books", "Members may borrow six books", '"', "\t", "3.", "[1")


@given(
    st.lists(st.sampled_from(PARTS + MORE_PARTS), max_size=14),
    st.lists(st.integers(0, 200), max_size=12),
    st.booleans(),
)
def test_pieces_do_not_matter(parts: list[str], cuts: list[int], alter: bool) -> None:
    text = "".join(parts)
    whole, cited, _ = _run(text, alter=alter)
    assert _run(text, tuple(cuts), alter=alter)[:2] == (whole, cited)
    assert _run(text, tuple(range(len(text))), alter=alter)[:2] == (whole, cited)
    if not alter:
        assert whole == text
    else:
        assert all(span == f"[{index}]" for index, span, _ in cited)


def test_support_prefers_word_order_among_equals() -> None:
    sources = (
        PromptSource(1, Passage("a", "a", ""), 1.0, "books borrow six members"),
        PromptSource(2, Passage("b", "b", ""), 0.5, "members borrow six books"),
    )
    assert Support(sources, 0.6).best("Members borrow six books.") == 2
    assert Support((), 0.6).best("Members borrow six books.") is None
