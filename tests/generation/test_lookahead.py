"""Fan-out, budget and look-up of outcome tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.lookahead import BranchBudget, OutcomeModel, fan_out, likeliest_outcomes, look_up
from generation.types import DraftProposal, LookaheadTable, Verification


@given(st.integers(0, 16), st.integers(1, 64), st.floats(0.0, 1.0), st.floats(0.1, 4.0))
def test_fan_out_spends_the_budget(k: int, budget: int, alpha: float, r: float) -> None:
    counts = fan_out(k, budget, alpha, r)
    assert len(counts) == k + 1
    assert sum(counts) == budget
    assert min(counts) >= 0


@given(st.integers(1, 8), st.floats(0.05, 0.95), st.floats(0.3, 3.0))
def test_fan_out_is_the_formula(k: int, alpha: float, r: float) -> None:
    """With a budget large enough for rounding not to matter."""
    budget = 10**10
    counts = fan_out(k, budget, alpha, r)
    for i in range(k):
        assert counts[i] / counts[0] == pytest.approx(alpha ** (i / (1 + r)), rel=1e-2)
    last = alpha ** (k / (1 + r)) * (1 - alpha) ** (-1 / (1 + r))
    assert counts[k] / counts[0] == pytest.approx(last, rel=1e-2)


def test_one_branch_is_pearls_bet() -> None:
    assert fan_out(5, 1, alpha=0.9) == (0, 0, 0, 0, 0, 1)
    assert fan_out(5, 1, alpha=0.1)[0] == 1
    assert fan_out(0, 4, alpha=0.5) == (4,)


def test_look_up_finds_only_what_was_prepared() -> None:
    prepared = DraftProposal((7, 8))
    table = LookaheadTable("r", 3, 40, {(1, 5): prepared})
    assert look_up(table, Verification(1, (9, 5), "recovered")) is prepared
    assert look_up(table, Verification(1, (9, 6), "recovered")) is None
    assert look_up(table, Verification(2, (9, 5, 5), "bonus")) is None


def test_the_budget_grows_behind_a_verification_and_shrinks_beyond_it() -> None:
    budget = BranchBudget(maximum=8)
    for _ in range(100):
        budget.update(table_seconds=0.004, verification_seconds=0.02)
    assert budget.branches == 8
    for _ in range(100):
        budget.update(table_seconds=0.03, verification_seconds=0.02)
    assert budget.branches == 1
    for _ in range(100):
        budget.update(table_seconds=0.019, verification_seconds=0.02)
    assert budget.branches == 1  # close enough: it stays


@pytest.mark.parametrize("maximum", [1, 2, 3, 64])
def test_the_budget_never_exceeds_its_maximum(maximum: int) -> None:
    budget = BranchBudget(maximum=maximum)
    assert 1 <= budget.branches <= maximum
    for _ in range(500):
        budget.update(0.001, 1.0)
        assert 1 <= budget.branches <= maximum


def test_alpha_follows_the_rounds() -> None:
    model = OutcomeModel()
    for _ in range(500):
        model.update(num_accepted=9, num_tested=10)
    assert model.alpha == pytest.approx(0.9, abs=0.01)
    for _ in range(1000):
        model.update(num_accepted=0, num_tested=1)
    assert model.alpha < 0.02
    OutcomeModel().update(0, 0)


def brute_force(
    ids: np.ndarray, probs: np.ndarray, proposed: list[int], own: np.ndarray
) -> dict[tuple[int, int], float]:
    """P(k, t) by the definition, outcome by outcome."""
    chances, reached = {}, 1.0
    for k in range(len(proposed) + 1):
        accept = float(np.clip(own[k], 1e-6, 1 - 1e-6)) ** 0.7 if k < len(proposed) else 0.0
        left = {
            int(t): float(p)
            for t, p in zip(ids[k], probs[k], strict=True)
            if k == len(proposed) or t != proposed[k]
        }
        total = sum(left.values())
        for token_id, prob in left.items():
            if prob > 0:
                chances[k, token_id] = reached * (1 - accept) * prob / total
        reached *= accept
    return chances


@given(st.integers(0, 5), st.integers(1, 12), st.integers(0, 10_000))
def test_the_likeliest_outcomes_are_taken(k: int, budget: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    probs = -np.sort(-generator.dirichlet(np.full(9, 0.4), size=k + 1), axis=1)
    ids = np.stack([generator.permutation(50)[:9] for _ in range(k + 1)])
    proposed = [int(ids[row, generator.integers(9)]) if generator.random() < 0.8 else 99 for row in range(k)]
    own = np.array(
        [probs[row, list(ids[row]).index(t)] if t != 99 else 0.0 for row, t in enumerate(proposed)]
    )
    got = likeliest_outcomes(ids, probs, proposed, own, budget)
    want = brute_force(ids, probs, proposed, own)
    assert len(got) == len(set(got)) == min(budget, len(want))
    assert all(outcome in want for outcome in got), "the drafted token cannot follow its own rejection"
    best = sorted(want.values(), reverse=True)[: len(got)]
    assert [want[outcome] for outcome in got] == pytest.approx(best)
