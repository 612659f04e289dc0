"""Sweeps measure what they say, predict by the formula, and recommend by the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rag_service.measurement import AcceptanceFigures, Setup
from rag_service.tuning import (
    Costs,
    Sweep,
    TuningResult,
    as_configuration,
    predicted_speed_up,
    recommend,
    sweep,
)
from rag_service.tuning_report import render
from tests.rag_service.pairs import known_pair, letter_prompts

NOTHING = AcceptanceFigures(None, None, None, None, None, None, 0, 0, 0, None)
COSTS = Costs({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}, 1 / 8, 100)


def _length(value: float) -> AcceptanceFigures:
    return replace(NOTHING, mean_acceptance_length=value)


def _result(mode: str, speed: float, **setup: object) -> TuningResult:
    chosen = Setup(mode=mode, **setup)  # type: ignore[arg-type]
    return TuningResult(
        "d" if mode not in ("off", "passages") else "", chosen, NOTHING, speed, None, None, None
    )


def test_predictions_are_those_of_the_mathematics() -> None:
    # Speculation.md, section 4: c = 1/8, v = 1; α=.8 at K=5 gives 2.27, α=.5 at K=4 gives 1.29.
    tau = (1 - 0.8**6) / 0.2
    assert predicted_speed_up(Setup("colocated", 5), _length(tau), COSTS) == pytest.approx(2.27, abs=0.005)
    tau = (1 - 0.5**5) / 0.5
    assert predicted_speed_up(Setup("colocated", 4), _length(tau), COSTS) == pytest.approx(1.29, abs=0.005)
    # Look-ahead where every table is a hit and hides behind the verification: τ itself (4.33 at K=8).
    tau = (1 - 0.8**9) / 0.2
    wide = replace(COSTS, verify_seconds={1: 1.0, 9: 1.0})
    assert predicted_speed_up(Setup("lookahead", 8), _length(tau), wide) == pytest.approx(4.33, abs=0.005)
    assert predicted_speed_up(Setup("passages", 4), _length(1.74), COSTS) == pytest.approx(1.74)
    assert predicted_speed_up(Setup("colocated", 4), NOTHING, COSTS) is None
    assert predicted_speed_up(Setup("colocated", 4), _length(2.0), replace(COSTS, draft_seconds=None)) is None


def test_combinations_that_do_the_same_are_measured_once() -> None:
    plan = Sweep(("passages", "colocated", "lookahead"), (2, 4), (4, 8), passages=(True, False))
    setups = plan.setups()
    by_mode = {mode: [setup for setup in setups if setup.mode == mode] for mode in plan.modes}
    assert {mode: len(found) for mode, found in by_mode.items()} == {
        "passages": 2,
        "colocated": 4,
        "lookahead": 8,
    }


def test_the_fastest_lossless_setup_is_recommended() -> None:
    results = [
        _result("colocated", 1.4),
        _result("lookahead", 1.6),
        _result("colocated", 2.5, acceptance="typical"),
        _result("colocated", 9.0, temperature=0.7),
        _result("off", 1.0),
    ]
    assert recommend(results) is results[1]
    assert recommend(results, temperature=0.7) is results[3]


def test_plain_decoding_is_recommended_when_nothing_beats_it() -> None:
    results = [_result("colocated", 0.8), _result("off", 1.0)]
    best = recommend(results)
    assert best.setup.mode == "off"
    assert as_configuration(best, None) == {
        "engine": {
            "speculation": {
                "mode": "off", "num_draft_tokens": 5, "passages": False, "acceptance": "token",
                "branch_budget": 8,
            }
        }
    }  # fmt: skip


def test_the_recommendation_is_a_configuration_the_service_takes() -> None:
    from rag_service.config import Settings

    values = as_configuration(_result("lookahead", 1.6, num_draft_tokens=4), "drafts/mine")
    settings = Settings.parse(values)
    assert settings.engine.speculation.mode == "lookahead"
    assert settings.draft.draft is not None
    assert settings.draft.draft.model == "drafts/mine"


def test_a_sweep_over_two_drafts_on_real_parts() -> None:
    close = known_pair(draft=(0.55, 0.35, 0.1))  # overlap .95
    far = known_pair()
    far.target = close.target
    plan = Sweep(("passages", "colocated"), (2,), temperatures=(1.0,), passages=(False,), max_tokens=40)
    seen: list[int] = []
    results, costs = sweep(
        {"close": close, "far": far}, letter_prompts(12), plan, lambda what, done, total: seen.append(done)
    )
    assert seen == [2, 4, 6, 8, 10, 12]
    tried = [(r.setup.mode, r.draft) for r in results]
    assert tried == [("passages", ""), ("colocated", "close"), ("colocated", "far"), ("off", "")]
    alpha = {r.draft: r.figures.acceptance_rate for r in results if r.setup.mode == "colocated"}
    assert alpha["close"] == pytest.approx(0.95, abs=0.05)
    assert alpha["far"] == pytest.approx(0.7, abs=0.08)
    off = [r for r in results if r.setup.mode == "off"]
    assert [(r.speed_up, r.draft) for r in off] == [(1.0, "")]
    assert set(costs["close"].verify_seconds) == {1, 2, 3}
    page = render(results, recommend(results), costs, "twelve <questions>")
    assert page.count("<svg") == 2
    assert "twelve &lt;questions&gt;" in page
    assert 'class="best"' in page
