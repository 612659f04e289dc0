"""An answer's own figures."""

from __future__ import annotations

from dataclasses import fields

from generation.types import DrafterCounts, SpeculationStats
from rag_service.api.replies import SpeculativeDecoding
from rag_service.figures import merged_stats, server_timing, speculation_figures, timing_figures
from tests.fakes import STATS


def test_merged_counts_are_sums() -> None:
    one = SpeculationStats(
        num_rounds=2,
        num_accepted_tokens=3,
        num_rejections=1,
        tested_per_position=(2, 1),
        rounds_by_cause={"rejected": 1, "censored": 1},
        by_drafter={"passages": DrafterCounts(4, 3, 1)},
    )
    both = merged_stats([STATS, one])
    assert both is not None
    assert (both.num_rounds, both.num_accepted_tokens, both.num_rejections) == (6, 11, 3)
    assert both.tested_per_position == (6, 5, 2)
    assert both.rounds_by_cause == {"all_accepted": 2, "rejected": 3, "censored": 1}
    assert both.by_drafter["passages"].num_accepted_tokens == 3
    assert merged_stats([]) is None
    assert merged_stats([STATS]) is STATS


def test_merging_forgets_no_field() -> None:
    doubled = merged_stats([STATS, STATS])
    assert doubled is not None
    for field in fields(SpeculationStats):
        value = getattr(STATS, field.name)
        if isinstance(value, (int, float)) and value:
            assert getattr(doubled, field.name) == 2 * value, field.name


def test_untested_is_none_and_the_documented_shape_holds() -> None:
    assert speculation_figures(None)["acceptance_rate"] is None
    figures = speculation_figures(STATS)
    assert SpeculativeDecoding.model_validate(figures).model_dump() == figures
    assert (figures["acceptance_rate"], figures["mean_acceptance_length"]) == (0.8, 3.0)


def test_timings() -> None:
    assert timing_figures({"search": 0.5}, None, 1.0) == {
        "search_seconds": 0.5,
        "time_to_first_token_seconds": None,
        "total_seconds": 1.0,
    }
    assert server_timing({"search": 0.0123, "rerank": 0.001}) == "search;dur=12.3, rerank;dur=1.0"
