"""The controller against the formulas of speculation.md, section 4: measured costs in, the best mode out."""

from __future__ import annotations

import itertools

import pytest

from generation.controller import (
    AlphaEstimate,
    Controller,
    Decision,
    ModelMode,
    RunningMean,
    StepCosts,
    expected_accepted,
)

T1 = 0.020
"""Seconds of a plain step in these tests."""


def controller(
    *,
    alpha: float,
    c: float,
    modes: tuple[ModelMode, ...] = ("off", "colocated"),
    row_cost: float = 0.0,
    max_k: int = 8,
    hit: float | None = None,
    exploration: float = 0.0,
    round_trip: float = 0.0,
    wait: float = 0.0,
    batch: int = 1,
) -> Controller:
    """A controller that has measured: ``c`` = t_d / t_v(1), a row costs ``row_cost`` of a step."""
    made = Controller(max_draft_tokens=max_k, modes=modes, exploration_rate=exploration)
    for _ in range(40):
        for width in (1, 2, 5, 9):
            made.verification.update(batch * width, T1 * (1 + row_cost * (batch * width - 1)))
    for _ in range(100):
        made.draft_step.update(c * T1)
        made.sync_overhead.update(round_trip)
        made.table_wait.update(wait)
    observe(made, alpha)
    if hit is not None and isinstance(made.hit_rate, AlphaEstimate):
        for _ in range(2000):
            made.hit_rate.update(hit, 1)
    return made


def observe(made: Controller, alpha: float, rounds: int = 2000, domain: str = "legal") -> None:
    for _ in range(rounds):
        made.observe_round(domain, alpha * 2, 2)


def predicted(tau: float, c: float, k: int, v: float = 1.0) -> float:
    return tau / (c * k + v)


@pytest.mark.parametrize(("alpha", "k", "speed_up"), [(0.8, 5, 2.27), (0.5, 4, 1.29)])
def test_worked_speed_ups(alpha: float, k: int, speed_up: float) -> None:
    """Same device, c = 1/8, v = 1."""
    made = controller(alpha=alpha, c=1 / 8)
    gain = made.tokens_per_second("colocated", k, alpha, 1) / made.tokens_per_second("off", 0, alpha, 1)
    assert gain == pytest.approx(speed_up, abs=0.01)


@pytest.mark.parametrize(("alpha", "c"), list(itertools.product([0.3, 0.5, 0.7, 0.9], [0.05, 0.125, 0.3])))
def test_the_best_k_is_the_formulas(alpha: float, c: float) -> None:
    made = controller(alpha=alpha, c=c)
    rates = {0: 1.0, **{k: predicted(1 + expected_accepted(alpha, k), c, k) for k in range(1, 9)}}
    best = max(rates.values())
    decision = made.decide("legal", 1, draft_open=True)
    chosen = rates[decision.num_draft_tokens]
    assert chosen >= best / 1.02  # α is known to about a percent
    assert (decision.mode == "off") == (decision.num_draft_tokens == 0)


def test_a_useless_draft_is_switched_off() -> None:
    assert controller(alpha=0.02, c=1 / 8).decide("legal", 1, draft_open=True) == Decision("off", 0)


def test_a_slow_draft_is_switched_off() -> None:
    assert controller(alpha=0.7, c=1.2).decide("legal", 1, draft_open=True).mode == "off"
    assert controller(alpha=0.7, c=0.3).decide("legal", 1, draft_open=True).mode == "colocated"


def test_break_even_follows_the_cost_not_a_fixed_alpha() -> None:
    """α = .35 pays at c = .05 and loses at c = .5; K = 1 breaks even at α = c."""
    assert controller(alpha=0.35, c=0.05).decide("legal", 1, draft_open=True).mode == "colocated"
    assert controller(alpha=0.35, c=0.5).decide("legal", 1, draft_open=True).mode == "off"
    made = controller(alpha=0.4, c=0.4)
    gain = made.tokens_per_second("colocated", 1, 0.4, 1) / made.tokens_per_second("off", 0, 0.4, 1)
    assert gain == pytest.approx(1.0, abs=0.01)


def test_wide_batches_shorten_proposals() -> None:
    """Where rows cost, the same α supports a smaller K at a larger batch."""
    alone = controller(alpha=0.7, c=0.05, row_cost=0.05).decide("legal", 1, draft_open=True)
    made = controller(alpha=0.7, c=0.05, row_cost=0.05, batch=16)
    crowded = made.decide("legal", 16, draft_open=True)
    assert crowded.num_draft_tokens < alone.num_draft_tokens


ALL_MODES: tuple[ModelMode, ...] = ("off", "colocated", "synchronous", "lookahead")


def test_lookahead_when_drafting_is_hidden() -> None:
    made = controller(alpha=0.8, c=1 / 8, modes=ALL_MODES, hit=0.9, round_trip=0.3 * T1)
    assert made.decide("legal", 1, draft_open=True).mode == "lookahead"


def test_no_lookahead_when_tables_never_hit_or_always_wait() -> None:
    missing = controller(alpha=0.8, c=1 / 8, modes=ALL_MODES, hit=0.02, round_trip=0.3 * T1)
    assert missing.decide("legal", 1, draft_open=True).mode == "colocated"
    waiting = controller(alpha=0.8, c=1 / 8, modes=ALL_MODES, hit=0.9, wait=3 * T1, round_trip=0.3 * T1)
    assert waiting.decide("legal", 1, draft_open=True).mode == "colocated"


def test_two_devices_that_wait_are_never_better_than_one() -> None:
    for alpha, c, k in itertools.product([0.3, 0.6, 0.9], [0.05, 0.2], [1, 4, 8]):
        made = controller(alpha=alpha, c=c, modes=ALL_MODES, round_trip=0.2 * T1)
        assert made.tokens_per_second("synchronous", k, alpha, 1) <= (
            made.tokens_per_second("colocated", k, alpha, 1) + 1e-9
        )


def test_a_closed_draft_leaves_only_what_is_here() -> None:
    made = controller(alpha=0.8, c=1 / 8, modes=("off", "synchronous", "lookahead"), hit=0.9)
    assert made.decide("legal", 1, draft_open=False).mode == "off"
    both = controller(alpha=0.8, c=1 / 8, modes=ALL_MODES, hit=0.9)
    assert both.decide("legal", 1, draft_open=False).mode == "colocated"


def test_it_does_not_flap() -> None:
    """α hovering around a break-even changes the decision seldom."""
    made = controller(alpha=0.125, c=1 / 8)
    decisions = []
    for step in range(400):
        made.observe_round("legal", 0.26 if step % 2 else 0.24, 2)
        decisions.append(made.decide("legal", 1, draft_open=True))
    changes = sum(left != right for left, right in itertools.pairwise(decisions))
    assert changes <= 4


def test_exploration_finds_a_draft_that_recovered() -> None:
    made = controller(alpha=0.02, c=0.1, exploration=0.05)
    observe(made, 0.02)
    explored, last = 0, None
    for step in range(4000):
        last = made.decide("legal", 1, draft_open=True)
        if last.mode != "off":
            explored += step < 200
            made.observe_round("legal", 0.85 * last.num_draft_tokens, last.num_draft_tokens)
    assert explored < 60  # before it recovers, exploring is seldom
    assert last is not None
    assert last.mode == "colocated"
    assert last.num_draft_tokens >= 3


def test_without_exploration_off_stays_off() -> None:
    made = controller(alpha=0.02, c=0.1)
    assert {made.decide("legal", 1, draft_open=True).mode for _ in range(300)} == {"off"}


def test_domains_decide_apart_with_a_shared_prior() -> None:
    made = Controller(max_draft_tokens=5, modes=("off", "colocated"), exploration_rate=0.0)
    for _ in range(50):
        made.verification.update(1, T1)
        made.verification.update(6, T1)
        made.draft_step.update(T1 / 5)
    for _ in range(500):
        made.observe_round("legal", 1.8, 2)
        made.observe_round("medical", 0.05, 2)
    assert made.decide("legal", 1, draft_open=True).mode == "colocated"
    assert made.decide("medical", 1, draft_open=True).mode == "off"
    assert made.alpha("never seen") == pytest.approx(0.46, abs=0.1)  # what all domains together say


def test_before_anything_is_measured_it_decides_something_valid() -> None:
    made = Controller(max_draft_tokens=3, modes=("off", "lookahead"))
    decision = made.decide("legal", 8, draft_open=True)
    assert 0 <= decision.num_draft_tokens <= 3
    assert Controller(max_draft_tokens=3, modes=("off",)).decide("x", 1, draft_open=True) == Decision(
        "off", 0
    )


def test_alpha_forgets_slowly_and_starts_at_its_prior() -> None:
    estimate = AlphaEstimate(start=0.55)
    assert estimate.value == pytest.approx(0.55)
    for _ in range(3000):
        estimate.update(0.9, 1)
    assert estimate.value == pytest.approx(0.9, abs=0.03)
    for _ in range(3000):
        estimate.update(0.2, 1)
    assert estimate.value == pytest.approx(0.2, abs=0.03)


def test_step_costs_find_the_line() -> None:
    costs = StepCosts()
    assert costs.seconds(1) > 0
    for rows in [1, 4, 8, 16, 2] * 60:
        costs.update(rows, 0.010 + 0.002 * rows)
    for rows in (1, 6, 24):
        assert costs.seconds(rows) == pytest.approx(0.010 + 0.002 * rows, rel=0.02)
    for rows in [1, 4, 8, 16, 2] * 200:  # the machine changed
        costs.update(rows, 0.030 + 0.001 * rows)
    assert costs.seconds(6) == pytest.approx(0.036, rel=0.03)


def test_step_costs_never_predict_nonsense() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.update(1, 0.02)
        costs.update(8, 0.01)  # wider is faster: noise
    assert 0 < costs.seconds(1) < 0.03
    assert 0 < costs.seconds(200) < 1.0


def test_running_mean_starts_at_its_first_value() -> None:
    mean = RunningMean(0.1)
    assert mean.get(7.0) == 7.0
    mean.update(2.0)
    assert mean.get(7.0) == 2.0
    mean.update(3.0)
    assert mean.get(7.0) == pytest.approx(2.1)


def test_a_proposal_grows_while_another_token_pays() -> None:
    """c = 1/6 and a row for a tenth of a step: at τ = 2 a token costs half a round."""
    made = Controller(max_draft_tokens=4, modes=("off", "colocated"), adaptive_length=True)
    for _ in range(60):
        for width in (1, 2, 5, 9):
            made.verification.update(width, T1 * (1 + 0.1 * (width - 1)))
        made.draft_step.update(T1 / 6)
        made.observe_length("legal", num_drafted=2, num_accepted=1)
    round_seconds = T1 * (1 + 2 * (0.1 + 1 / 6))
    want = T1 * (0.1 + 1 / 6) * 2 / round_seconds
    assert made.min_reach("colocated", "legal", 1) == pytest.approx(want, rel=0.02)
    hidden = T1 * 0.1 * 2 / (T1 * 1.2)
    assert made.min_reach("lookahead", "legal", 1) == pytest.approx(hidden, rel=0.02)
    assert made.min_reach("colocated", "legal", 8) > made.min_reach("colocated", "legal", 1)
    rate = made.tokens_per_second("colocated", 4, made.alpha("legal"), 1, "legal")
    assert rate == pytest.approx(2 / round_seconds, rel=0.02)


def test_fixed_lengths_grow_to_the_end() -> None:
    assert controller(alpha=0.5, c=0.2).min_reach("colocated", "legal", 1) == 0.0
