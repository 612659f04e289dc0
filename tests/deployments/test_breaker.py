"""The breaker and the deadline, exactly, on a clock of the test's own."""

from __future__ import annotations

import pytest

from deployments.breaker import Breaker, BreakerConfig, Breakers


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


CONFIG = BreakerConfig(
    window_calls=10,
    window_seconds=30.0,
    min_calls=5,
    failure_share=0.5,
    open_seconds=1.0,
    backoff=2.0,
    max_open_seconds=3.0,
    probes=1,
    successes_to_close=2,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(CONFIG, clock)


def state(breaker: Breaker) -> str:
    return breaker.state


def opened(breaker: Breaker) -> Breaker:
    for _ in range(CONFIG.min_calls):
        breaker.failed()
    assert state(breaker) == "open"
    return breaker


def test_stays_closed_below_min_calls_and_opens_at_it(breaker: Breaker) -> None:
    for _ in range(4):
        breaker.failed()
    assert state(breaker) == "closed"
    assert breaker.allow()
    breaker.failed()
    assert state(breaker) == "open"
    assert not breaker.allow()
    assert breaker.num_opened == 1


def test_exact_share_at_which_it_opens(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.succeeded()
    for _ in range(4):
        breaker.failed()
    assert state(breaker) == "closed"  # 4 of 9
    breaker.failed()
    assert state(breaker) == "open"  # 5 of 10 is one half


def test_a_draft_that_answers_one_in_ten_is_failing_although_every_call_returns(breaker: Breaker) -> None:
    for _ in range(5):
        assert breaker.allow()
        breaker.record(num_ok=1, num_failed=9)
    assert state(breaker) == "open"


def test_a_draft_that_answers_nine_in_ten_is_not(breaker: Breaker) -> None:
    for _ in range(50):
        assert breaker.allow()
        breaker.record(num_ok=9, num_failed=1)
    assert state(breaker) == "closed"
    assert breaker.failure_share == pytest.approx(0.1)


def test_one_answer_in_ten_calls_opens_whatever_the_order(clock: Clock) -> None:
    for good in range(10):
        breaker = Breaker(CONFIG, clock)
        for call in range(10):
            if breaker.allow():
                breaker.record(*((1, 0) if call == good else (0, 1)))
        assert state(breaker) == "open", good


def test_old_outcomes_are_forgotten_by_time_and_by_number(breaker: Breaker, clock: Clock) -> None:
    for _ in range(4):
        breaker.failed()
    clock.now += 30.1
    assert breaker.failure_share is None
    breaker.failed()
    assert state(breaker) == "closed"
    for _ in range(10):
        breaker.succeeded()
    assert breaker.failure_share == 0.0


def test_half_open_lets_one_probe_through_and_closes_after_two_good_ones(
    breaker: Breaker, clock: Clock
) -> None:
    opened(breaker)
    clock.now += 0.99
    assert not breaker.allow()
    clock.now += 0.01
    assert state(breaker) == "half_open"
    assert breaker.allow()
    assert not breaker.allow()
    breaker.succeeded()
    assert state(breaker) == "half_open"
    assert breaker.allow()
    breaker.succeeded()
    assert state(breaker) == "closed"
    assert breaker.failure_share is None  # a clean sheet


def test_failed_probes_wait_longer_up_to_the_maximum_and_a_close_resets(
    breaker: Breaker, clock: Clock
) -> None:
    opened(breaker)
    for seconds in (1.0, 2.0, 3.0, 3.0):
        clock.now += seconds - 0.01
        assert not breaker.allow()
        clock.now += 0.01
        assert breaker.allow()
        breaker.failed()
    clock.now += 3.0
    for _ in range(2):
        assert breaker.allow()
        breaker.succeeded()
    opened(breaker)
    clock.now += 1.0
    assert state(breaker) == "half_open"


def test_a_half_good_probe_is_judged_by_the_same_share(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1.0
    assert breaker.allow()
    breaker.record(num_ok=1, num_failed=9)
    assert state(breaker) == "open"


def test_an_abandoned_or_empty_probe_gives_its_slot_back(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1.0
    assert breaker.allow()
    breaker.abandon()
    assert breaker.allow()
    breaker.record(0, 0)
    assert breaker.allow()


def test_late_answers_to_calls_from_before_it_opened_change_nothing(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    breaker.succeeded()
    breaker.succeeded()
    assert state(breaker) == "open"
    clock.now += 1.0
    breaker.failed()
    assert state(breaker) == "half_open"
    assert breaker.num_opened == 1


def test_trip_opens_at_once(breaker: Breaker) -> None:
    breaker.trip()
    assert not breaker.allow()


def test_breakers_are_kept_by_replica_and_bounded(clock: Clock) -> None:
    breakers = Breakers(CONFIG, clock, max_replicas=2)
    opened(breakers["a"])
    assert breakers["b"].allow()
    assert breakers.states() == {"a": "open", "b": "closed"}
    breakers["a"].allow()
    breakers["c"].allow()
    assert set(breakers.states()) == {"a", "c"}
    breakers.keep(["c", "d"])
    assert set(breakers.states()) == {"c"}
    assert state(breakers["a"]) == "closed"


@pytest.mark.parametrize(
    "values",
    [{"min_calls": 0}, {"window_calls": 2}, {"failure_share": 0.0}, {"probes": 0}, {"backoff": 0.5}],
)
def test_senseless_settings_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        BreakerConfig(**values)  # type: ignore[arg-type]


def test_negative_counts_are_refused(breaker: Breaker) -> None:
    with pytest.raises(ValueError, match="negative"):
        breaker.record(-1, 0)
