"""Sentence ends, whole and while a text is still growing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.sentences import sentence_ends, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", " Two!", " Three?"]),
        (
            "Dr. Smith paid 3.5% (see Fig. 2). He left.",
            ["Dr. Smith paid 3.5% (see Fig. 2).", " He left."],
        ),
        ("1. First item\n2. Second item", ["1. First item", "\n2. Second item"]),
        ('He said "stop." Then nothing.', ['He said "stop."', " Then nothing."]),
        ("No end", ["No end"]),
        ("Wait... what? 。", ["Wait...", " what?", " 。"]),
        ("J. R. Doe et al. agree.", ["J. R. Doe et al. agree."]),
        ("  ", []),
    ],
)
def test_split(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_an_end_that_more_text_could_undo_is_not_told() -> None:
    assert sentence_ends("It costs 3.", final=False) == []
    assert sentence_ends("It costs 3. ", final=False) == [11]
    assert sentence_ends("It costs 3.", final=True) == [11]


@given(st.text(alphabet='ab.!? \n1"', max_size=60))
def test_sentences_join_to_the_text(text: str) -> None:
    assert "".join(split_sentences(text)) == text[: len(text.rstrip())] or not text.strip()


@given(st.text(alphabet='ab.!? \n1"', max_size=40), st.text(alphabet='ab.!? \n1"', max_size=10))
def test_told_ends_stand_whatever_follows(text: str, more: str) -> None:
    told = sentence_ends(text, final=False)
    assert set(told) <= set(sentence_ends(text + more))
