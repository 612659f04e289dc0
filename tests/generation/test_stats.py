"""Counting: what was tested, what was censored, and the figures that follow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.stats import StatsBuilder
from generation.types import ROUND_CAUSES, DrafterKind, DraftProposal, SpeculationStats, Verification
from tests.generation.enumeration import Enumerator


def proposal(k: int, *kinds: DrafterKind) -> DraftProposal:
    return DraftProposal(tuple(range(k)), kinds=kinds)


def accepted(num_accepted: int, k: int, overlap: float = 0.5) -> Verification:
    kept = tuple(range(num_accepted))
    tested = min(num_accepted + 1, k)
    return Verification(
        num_accepted,
        (*kept, 99),
        "bonus" if num_accepted == k else "recovered",
        (overlap,) * tested,
    )


def built(*rounds: tuple[DraftProposal, Verification, int]) -> SpeculationStats:
    builder = StatsBuilder()
    for round_ in rounds:
        builder.add_round(*round_)
    return builder.build()


def test_a_rejection_tests_one_position_more_than_it_accepts() -> None:
    stats = built((proposal(4), accepted(2, 4), 3))
    assert stats.tested_per_position == (1, 1, 1)
    assert stats.accepted_per_position == (1, 1, 0)
    assert (stats.num_accepted_tokens, stats.num_rejections, stats.num_draft_tokens) == (2, 1, 4)
    assert stats.acceptance_rate == pytest.approx(2 / 3)
    assert stats.accepted_over_drafted == pytest.approx(2 / 4)
    assert stats.mean_acceptance_length == pytest.approx(3.0)
    assert stats.acceptance_histogram == (0, 0, 1)
    assert stats.rounds_by_cause == {"rejected": 1}
    assert stats.overlap_sum == pytest.approx(1.5)
    assert stats.num_overlap == 3


def test_denominators_are_by_position() -> None:
    stats = built(
        (proposal(3), accepted(3, 3), 4),
        (proposal(3), accepted(1, 3), 2),
        (proposal(1), accepted(0, 1), 1),
        (proposal(2), accepted(2, 2), 3),
    )
    assert stats.tested_per_position == (4, 3, 1)
    assert stats.accepted_per_position == (3, 2, 1)
    assert stats.rounds_by_cause == {"all_accepted": 2, "rejected": 2}
    assert stats.acceptance_histogram == (1, 1, 1, 1)
    assert sum(stats.tested_per_position) == stats.num_accepted_tokens + stats.num_rejections


def test_what_a_stop_cuts_off_is_censored_not_rejected() -> None:
    """Four of five accepted, but the answer ended after two tokens: two tested, no rejection."""
    stats = built((proposal(5), accepted(4, 5), 2))
    assert stats.tested_per_position == (1, 1)
    assert stats.num_rejections == 0
    assert stats.acceptance_rate == 1.0
    assert stats.rounds_by_cause == {"censored": 1}
    assert stats.num_overlap == 2


def test_a_cut_right_before_the_recovered_token_is_censored() -> None:
    stats = built((proposal(5), accepted(2, 5), 2))
    assert (stats.num_accepted_tokens, stats.num_rejections) == (2, 0)
    assert stats.rounds_by_cause == {"censored": 1}


def test_an_answer_that_ends_with_its_recovered_token_was_rejected_all_the_same() -> None:
    stats = built((proposal(5), accepted(2, 5), 3))
    assert (stats.num_accepted_tokens, stats.num_rejections) == (2, 1)


def test_rounds_without_a_proposal_count_under_their_cause_and_test_nothing() -> None:
    causes = ("off", "timeout", "miss", "draft_down", "overloaded")
    stats = built(*[(DraftProposal(empty_cause=cause), accepted(0, 0), 1) for cause in causes])
    assert stats.rounds_by_cause == {f"no_proposal_{cause}": 1 for cause in causes}
    assert set(stats.rounds_by_cause) <= set(ROUND_CAUSES)
    assert stats.num_rounds == 5
    assert stats.tested_per_position == ()
    assert stats.acceptance_histogram == ()
    assert stats.acceptance_rate is None
    assert stats.accepted_over_drafted is None
    assert stats.mean_acceptance_length == 1.0
    assert stats.drafter == "none"


def test_nothing_is_none() -> None:
    stats = StatsBuilder().build()
    assert (stats.acceptance_rate, stats.accepted_over_drafted, stats.mean_acceptance_length) == (None,) * 3


def test_drafters_are_told_apart() -> None:
    stats = built(
        (proposal(3, "passages", "passages", "model"), accepted(2, 3), 3),
        (proposal(2, "history", "history"), accepted(0, 2), 1),
    )
    assert stats.drafter == "history+model+passages"
    passages, model, history = (stats.by_drafter[kind] for kind in ("passages", "model", "history"))
    assert (passages.num_draft_tokens, passages.num_accepted_tokens, passages.num_rejections) == (2, 2, 0)
    assert (model.num_draft_tokens, model.num_accepted_tokens, model.num_rejections) == (1, 0, 1)
    assert (history.num_draft_tokens, history.num_accepted_tokens, history.num_rejections) == (2, 0, 1)
    assert sum(c.overlap_sum for c in stats.by_drafter.values()) == pytest.approx(stats.overlap_sum)


def test_block_verification_shows_the_overlap_estimator() -> None:
    builder = StatsBuilder("block")
    builder.add_round(proposal(3), accepted(1, 3, overlap=0.7), 2)
    stats = builder.build()
    assert stats.acceptance_rate == pytest.approx(0.7)
    assert not stats.lossy
    assert StatsBuilder("typical").build().lossy


@pytest.mark.parametrize(("k", "ratio"), [(1, 0.80), (4, 0.59), (8, 0.42)])
def test_alpha_is_not_accepted_over_drafted(k: int, ratio: float) -> None:
    """α = .8 exactly, over the exact distribution of rounds: the two figures of speculation.md, section 3."""
    tree = Enumerator()

    def one_round() -> int:
        for i in range(k):
            if tree.choose([0.8, 0.2]) == 1:
                return i
        return k

    rounds = tree.distribution(one_round)
    drafted = accepted_tokens = rejections = 0.0
    for num_accepted, probability in rounds.items():
        one = StatsBuilder()
        one.add_round(proposal(k), accepted(num_accepted, k), num_accepted + 1)
        stats = one.build()
        drafted += probability * stats.num_draft_tokens
        accepted_tokens += probability * stats.num_accepted_tokens
        rejections += probability * stats.num_rejections
    assert accepted_tokens / (accepted_tokens + rejections) == pytest.approx(0.8, abs=1e-12)
    assert accepted_tokens / drafted == pytest.approx(ratio, abs=5e-3)
    assert accepted_tokens / drafted == pytest.approx(sum(0.8**i for i in range(1, k + 1)) / k, abs=1e-12)


def test_censoring_does_not_bias_alpha() -> None:
    """Answers that stop at random places: α̂ stays α (2 % at 60,000 tested tokens)."""
    generator = np.random.default_rng(0)
    builder = StatsBuilder()
    for _ in range(20_000):
        num_accepted = next((i for i in range(5) if generator.random() > 0.8), 5)
        stop = int(generator.integers(1, 7))
        verification = accepted(num_accepted, 5)
        builder.add_round(proposal(5), verification, min(stop, num_accepted + 1))
    assert builder.build().acceptance_rate == pytest.approx(0.8, abs=0.01)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 7)), max_size=30))
def test_counts_always_add_up(rounds: list[tuple[int, int, int]]) -> None:
    builder = StatsBuilder()
    for k, num_accepted, kept in rounds:
        num_accepted = min(num_accepted, k)
        builder.add_round(proposal(k), accepted(num_accepted, k), min(kept, num_accepted + 1))
    stats = builder.build()
    assert stats.num_rounds == len(rounds) == sum(stats.rounds_by_cause.values())
    assert sum(stats.tested_per_position) == stats.num_accepted_tokens + stats.num_rejections
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert sum(j * n for j, n in enumerate(stats.acceptance_histogram)) == stats.num_accepted_tokens
    assert list(stats.tested_per_position) == sorted(stats.tested_per_position, reverse=True)
    assert stats.rounds_by_cause.get("rejected", 0) == stats.num_rejections
