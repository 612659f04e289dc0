"""Search queries from conversations."""

from __future__ import annotations

import pytest

from rag_service.rewrite import needs_context, rewrite_query

HISTORY = [
    {"role": "user", "content": "What fees does the Alder savings account have?"},
    {"role": "assistant", "content": "The account called Alder costs 3.50 a month."},
]


@pytest.mark.parametrize(
    ("question", "query"),
    [
        ("And when is it due?", "And when is it due? Alder 3.50 fees savings account"),
        (
            "Which documents does a mortgage application need?",
            "Which documents does a mortgage application need?",
        ),
        ("Why?", "Why? Alder 3.50 fees savings account"),
    ],
)
def test_only_a_leaning_turn_is_extended(question: str, query: str) -> None:
    assert rewrite_query(question, HISTORY) == query


def test_first_turn_stays() -> None:
    assert rewrite_query(" Why? ", []) == "Why?"


def test_terms_are_bounded_and_newest_first() -> None:
    history = [{"role": "user", "content": "oldest words"}, {"role": "user", "content": "newest terms"}]
    assert rewrite_query("And it?", history, max_terms=2) == "And it? newest terms"


@pytest.mark.parametrize(
    "question", ["What about its price?", "And deposits?", "How so?", "Compare those rates"]
)
def test_leaning(question: str) -> None:
    assert needs_context(question)
