"""What an answer tells about its own decoding: acceptance and stage times, in the published names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from generation.types import DrafterCounts, SpeculationStats


def merged_stats(stats: Iterable[SpeculationStats]) -> SpeculationStats | None:
    """The counts of several sequences as those of one; None for no sequence."""
    parts = list(stats)
    if len(parts) <= 1:
        return parts[0] if parts else None
    causes: Counter[str] = Counter()
    for part in parts:
        causes.update(part.rounds_by_cause)
    kinds = sorted({kind for part in parts for kind in part.by_drafter})
    return SpeculationStats(
        num_rounds=sum(part.num_rounds for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        num_rejections=sum(part.num_rejections for part in parts),
        tested_per_position=_added(part.tested_per_position for part in parts),
        accepted_per_position=_added(part.accepted_per_position for part in parts),
        acceptance_histogram=_added(part.acceptance_histogram for part in parts),
        rounds_by_cause=dict(causes),
        overlap_sum=sum(part.overlap_sum for part in parts),
        num_overlap=sum(part.num_overlap for part in parts),
        by_drafter={kind: _counts(part.by_drafter.get(kind) for part in parts) for kind in kinds},
        lookahead_hits=sum(part.lookahead_hits for part in parts),
        lookahead_misses=sum(part.lookahead_misses for part in parts),
        hidden_draft_seconds=sum(part.hidden_draft_seconds for part in parts),
        waited_draft_seconds=sum(part.waited_draft_seconds for part in parts),
        acceptance_method=parts[0].acceptance_method,
    )


def speculation_figures(stats: SpeculationStats | None) -> dict[str, Any]:
    """``metrics.speculative_decoding`` of an answer. A rate that nothing was tested for is null."""
    stats = stats or SpeculationStats()
    return {
        "acceptance_rate": stats.acceptance_rate,
        "accepted_over_drafted": stats.accepted_over_drafted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "num_rounds": stats.num_rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_rejections": stats.num_rejections,
        "acceptance_histogram": list(stats.acceptance_histogram),
        "rounds_by_cause": dict(stats.rounds_by_cause),
        "drafter": stats.drafter,
        "by_drafter": {
            kind: {
                "num_draft_tokens": counts.num_draft_tokens,
                "num_accepted_draft_tokens": counts.num_accepted_tokens,
            }
            for kind, counts in stats.by_drafter.items()
        },
        "lookahead_hits": stats.lookahead_hits,
        "lookahead_misses": stats.lookahead_misses,
        "acceptance_method": stats.acceptance_method,
        "lossy": stats.lossy,
    }


def timing_figures(stages: Mapping[str, float], first_token: float | None, total: float) -> dict[str, Any]:
    """``metrics.timings``: seconds by stage, to the first token, and in all."""
    named: dict[str, Any] = {f"{stage}_seconds": round(seconds, 6) for stage, seconds in stages.items()}
    named["time_to_first_token_seconds"] = None if first_token is None else round(first_token, 6)
    named["total_seconds"] = round(total, 6)
    return named


def server_timing(stages: Mapping[str, float]) -> str:
    """The ``Server-Timing`` header: milliseconds by stage."""
    return ", ".join(f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in stages.items())


def _added(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


def _counts(counts: Iterable[DrafterCounts | None]) -> DrafterCounts:
    parts = [part for part in counts if part is not None]
    return DrafterCounts(
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        num_rejections=sum(part.num_rejections for part in parts),
        overlap_sum=sum(part.overlap_sum for part in parts),
        num_overlap=sum(part.num_overlap for part in parts),
    )
