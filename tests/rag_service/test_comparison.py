"""A fall in α is called beyond noise when it is, and within noise when it may be chance."""

from __future__ import annotations

import random

from rag_service.comparison import compare_acceptance
from rag_service.measurement import RequestOutcome
from tests.rag_service.pairs import outcome


def _side(alpha: float, count: int, seed: int) -> list[RequestOutcome]:
    """Requests of 40 tested tokens each."""
    rng = random.Random(seed)
    accepted = [sum(rng.random() < alpha for _ in range(40)) for _ in range(count)]
    return [
        outcome(number, kept, 40 - kept, domain=("red", "blue")[number % 2])
        for number, kept in enumerate(accepted)
    ]


def test_a_large_fall_is_beyond_noise() -> None:
    found = compare_acceptance(_side(0.85, 40, 1), _side(0.62, 40, 2))
    assert [row.domain for row in found] == ["all", "red", "blue"]
    assert all(row.beyond_noise for row in found)
    assert found[0].sentence.startswith("all: α fell from 0.8")
    assert found[0].interval is not None
    low, high = found[0].interval
    assert found[0].sentence.endswith(
        f"beyond noise (difference {found[0].difference:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})."
    )
    assert found[0].interval is not None
    assert found[0].interval[0] < -0.23 < found[0].interval[1]


def test_the_same_draft_twice_is_within_noise() -> None:
    found = compare_acceptance(_side(0.7, 30, 1), _side(0.7, 30, 2))
    assert not found[0].beyond_noise
    assert "within noise" in found[0].sentence


def test_equal_drafts_on_few_questions_seldom_differ_beyond_noise() -> None:
    """Of pairs of equal drafts on three questions, resampling alone would call every fifth one a change."""
    changes = 0
    for seed in range(100):
        found = compare_acceptance(_side(0.7, 3, seed), _side(0.7, 3, 1000 + seed), num_resamples=300)
        changes += found[0].beyond_noise
    assert changes <= 12


def test_one_question_proves_nothing() -> None:
    found = compare_acceptance([outcome(0, 9, 1)], [outcome(0, 1, 9)])
    assert found[0].interval is None
    assert not found[0].beyond_noise


def test_a_side_without_tests_is_said_to_be_so() -> None:
    found = compare_acceptance([outcome(0, 9, 1)], [outcome(0, 0, 0)])
    assert found[0].difference is None
    assert "nothing was tested" in found[0].sentence
