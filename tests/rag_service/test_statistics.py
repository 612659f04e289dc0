"""Intervals: right where the answer is known, honest where there is little to say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from rag_service import statistics


def test_pooled_and_mean_of_requests_differ() -> None:
    accepted, tested = [1, 90], [2, 100]
    assert statistics.pooled_ratio(accepted, tested) == pytest.approx(91 / 102)
    assert statistics.mean_of_ratios(accepted, tested) == pytest.approx((0.5 + 0.9) / 2)


def test_nothing_tested_is_none() -> None:
    assert statistics.pooled_ratio([], []) is None
    assert statistics.pooled_ratio([0, 0], [0, 0]) is None
    assert statistics.mean_of_ratios([0], [0]) is None
    assert statistics.ratio_interval([0, 0], [0, 0]) is None
    assert statistics.ratio_interval([3], [4]) is None
    assert statistics.percentiles([]) == {"p50": None, "p95": None, "p99": None}
    assert statistics.percentile_interval([1.0], 50) is None


def test_interval_is_reproducible_and_holds_the_estimate() -> None:
    rng = np.random.default_rng(3)
    tested = rng.integers(5, 40, 120)
    accepted = rng.binomial(tested, 0.7)
    first = statistics.ratio_interval(accepted, tested, seed=5)
    assert first is not None
    assert first == statistics.ratio_interval(accepted, tested, seed=5)
    estimate = statistics.pooled_ratio(accepted, tested)
    assert estimate is not None
    assert first[0] < estimate < first[1]


def test_interval_covers_the_truth_when_requests_differ() -> None:
    """Requests with rates of their own: 95 % intervals must cover the pooled truth about 95 times in 100.

    An interval over tokens, as the second figure shows, covers far less often.
    """
    rng = np.random.default_rng(11)
    covered = tokenwise = 0
    for trial in range(200):
        tested = rng.integers(10, 60, 80)
        accepted = rng.binomial(tested, rng.beta(7, 3, 80))
        interval = statistics.ratio_interval(accepted, tested, num_resamples=400, seed=trial)
        assert interval is not None
        covered += int(interval[0] <= 0.7 <= interval[1])
        naive = stats.binomtest(int(accepted.sum()), int(tested.sum())).proportion_ci(0.95)
        tokenwise += int(naive.low <= 0.7 <= naive.high)
    assert covered >= 180
    assert tokenwise <= 140


def test_pooling_many_requests_into_groups_keeps_the_width() -> None:
    rng = np.random.default_rng(2)
    tested = rng.integers(5, 40, 6000).astype(float)
    accepted = rng.binomial(tested.astype(int), rng.beta(7, 3, 6000)).astype(float)
    interval = statistics.ratio_interval(accepted, tested)
    assert interval is not None
    residual = accepted - tested * accepted.sum() / tested.sum()
    half_width = 1.96 * np.sqrt(np.sum(residual**2)) / tested.sum()
    assert (interval[1] - interval[0]) / 2 == pytest.approx(half_width, rel=0.12)


@pytest.mark.parametrize(("accepted", "side"), [([5, 5, 5], 1.0), ([0, 0, 0], 0.0)])
def test_all_accepted_or_none_does_not_claim_certainty(accepted: list[int], side: float) -> None:
    interval = statistics.ratio_interval(accepted, [5, 5, 5])
    assert interval is not None
    assert side in interval
    assert interval[1] - interval[0] > 0.5


def test_percentiles_and_their_interval() -> None:
    values = np.arange(1, 1001) / 100
    found = statistics.percentiles(values)
    assert found["p50"] == pytest.approx(5.005)
    assert found["p99"] == pytest.approx(9.9001)
    interval = statistics.percentile_interval(values, 95)
    assert interval is not None
    assert interval[0] < 9.5 < interval[1]
    assert statistics.percentile_interval([1.0, 2.0, 3.0], 99) is None


def test_mean_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    interval = statistics.mean_interval(values)
    assert interval is not None
    assert interval[1] - interval[0] == pytest.approx(2 * 1.96 / 20, rel=0.2)
    assert statistics.mean_interval([2.0]) is None
    assert statistics.mean_interval([2.0, 2.0]) == (2.0, 2.0)


def test_the_cautious_interval_holds_on_few_requests() -> None:
    """Rates exactly at a bar must rarely clear it: of samples of four, resampling lets far more through."""
    rng = np.random.default_rng(0)
    passed = {"resampled": 0, "cautious": 0}
    for _ in range(300):
        tested = rng.integers(15, 45, 4)
        accepted = rng.binomial(tested, rng.beta(14, 6, 4))
        for name, found in (
            ("resampled", statistics.ratio_interval(accepted, tested, num_resamples=300)),
            ("cautious", statistics.cautious_ratio_interval(accepted, tested)),
        ):
            assert found is not None
            passed[name] += found[0] >= 0.7
    assert passed["resampled"] > 24
    assert passed["cautious"] < 18


def test_the_cautious_interval_of_all_accepted_is_no_certainty() -> None:
    assert statistics.cautious_ratio_interval([10] * 3, [10] * 3) == statistics.ratio_interval(
        [10] * 3, [10] * 3
    )
    assert statistics.cautious_ratio_interval([3], [4]) is None
