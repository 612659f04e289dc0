"""Drift: seen when the rate really falls, quiet when it doesn't, and with the cause beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.drift import delay_of, is_false_alarm, simulated_columns
from rag_service.drift import detect_drift
from rag_service.request_columns import RequestColumns


def requests(rates: list[float], seed: int = 0) -> RequestColumns:
    return simulated_columns(np.random.default_rng(seed), np.array(rates), np.arange(len(rates)) * 60.0)


def relabelled(columns: RequestColumns, name: str, values: list[str]) -> RequestColumns:
    return replace(columns, names=columns.names | {name: np.array(values, dtype=object)})


@pytest.mark.parametrize("baseline", [0.85, None])
def test_fall_is_found_with_its_beginning(baseline: float | None) -> None:
    found = detect_drift(requests([0.85] * 300 + [0.62] * 100), baseline)
    assert found is not None
    assert found["direction"] == "fell"
    assert found["begun_at"] == pytest.approx(300 * 60, abs=25 * 60)
    assert found["rate_after"] == pytest.approx(0.62, abs=0.04)
    assert found["reference"] == ("baseline" if baseline else "earlier")
    assert found["changed"] == []


def test_rise_is_found_too() -> None:
    found = detect_drift(requests([0.6] * 200 + [0.8] * 100))
    assert found is not None
    assert found["direction"] == "rose"


def test_rate_below_its_gate_from_the_start_is_found() -> None:
    found = detect_drift(requests([0.7] * 200), 0.85)
    assert found is not None
    assert found["begun_before_window"] is True
    assert detect_drift(requests([0.7] * 200)) is None


def test_recovered_rate_is_no_drift() -> None:
    assert detect_drift(requests([0.85] * 200 + [0.6] * 60 + [0.85] * 100), 0.85) is None
    assert detect_drift(requests([0.85] * 200 + [0.6] * 60 + [0.85] * 100)) is None


def test_too_few_requests_or_too_small_a_change_is_no_drift() -> None:
    assert detect_drift(requests([0.85] * 40 + [0.5] * 30), 0.85) is None
    assert detect_drift(requests([0.85] * 3000 + [0.82] * 3000), 0.85) is None


def test_lossy_and_untested_requests_are_left_out() -> None:
    columns = requests([0.85] * 200 + [0.5] * 100)
    methods = ["token"] * 200 + ["typical"] * 100
    assert detect_drift(relabelled(columns, "acceptance_method", methods), 0.85) is None
    assert detect_drift(relabelled(columns, "acceptance_method", [""] * 300), 0.85) is None


def test_requests_that_are_all_alike() -> None:
    columns = requests([0.5] * 300)
    columns.counts["num_accepted_tokens"][:] = 10
    columns.counts["num_rejections"][:] = 0
    assert detect_drift(columns, 1.0) is None
    columns.counts["num_accepted_tokens"][200:] = 5
    columns.counts["num_rejections"][200:] = 5
    found = detect_drift(columns, 1.0)
    assert found is not None
    assert found["begun_at"] == 200 * 60


def test_new_draft_is_named() -> None:
    columns = relabelled(requests([0.85] * 200 + [0.62] * 100), "draft", ["d1"] * 200 + ["d2"] * 100)
    found = detect_drift(columns, 0.85)
    assert found is not None
    (change,) = found["changed"]
    assert change["dimension"] == "draft"
    assert change["after"]["d2"] > 0.9
    assert change["difference_within"] is None or abs(change["difference_within"]) > 0.1


def test_changed_mix_explains_the_fall() -> None:
    """Greedy requests hold .9 and warm ones .5 throughout; only their shares change."""
    rng = np.random.default_rng(3)
    warm = np.concatenate([rng.random(300) < 0.1, rng.random(150) < 0.8])
    columns = relabelled(
        requests(np.where(warm, 0.5, 0.9).tolist()), "temperature", np.where(warm, "0.5-1", "0").tolist()
    )
    found = detect_drift(columns)
    assert found is not None
    assert found["rate_before"] - found["rate_after"] > 0.2
    (change,) = found["changed"]
    assert change["dimension"] == "temperature"
    assert abs(change["difference_within"]) < 0.05


@pytest.mark.slow
def test_few_false_alarms_and_a_short_delay() -> None:
    """The published figures, on fewer weeks; benchmarks/drift.py measures a hundred."""
    alarms = sum(
        is_false_alarm(seed, 0.85, 20.0, baseline) for seed in range(10) for baseline in (0.85, None)
    )
    assert alarms <= 1
    delays = [delay_of(seed, 20.0, 0.85) for seed in range(5)]
    found = [delay for delay in delays if delay is not None]
    assert len(found) == 5
    assert max(delay["requests"] for delay in found) <= 120
    assert max(delay["begin_error_hours"] for delay in found) <= 4
