"""Request records made up for tests of what is counted and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from generation.types import AcceptanceMethod, DrafterCounts, SpeculationStats
from rag_service.record import RequestRecord

NOON = 1_780_000_000.0
NUM_DRAFT_TOKENS = 4


def stats_of(
    accepted_counts: Sequence[int],
    *,
    num_empty: int = 0,
    kind: str = "model",
    method: AcceptanceMethod = "token",
    overlap: float = 0.5,
) -> SpeculationStats:
    """Counts of rounds of four draft tokens that accepted so many each, and of empty rounds."""
    k = NUM_DRAFT_TOKENS
    accepted = sum(accepted_counts)
    rejections = sum(count < k for count in accepted_counts)
    tested = accepted + rejections
    return SpeculationStats(
        num_rounds=len(accepted_counts) + num_empty,
        num_draft_tokens=k * len(accepted_counts),
        num_accepted_tokens=accepted,
        num_rejections=rejections,
        tested_per_position=tuple(sum(count >= i for count in accepted_counts) for i in range(k)),
        accepted_per_position=tuple(sum(count > i for count in accepted_counts) for i in range(k)),
        acceptance_histogram=tuple(sum(count == j for count in accepted_counts) for j in range(k + 1)),
        rounds_by_cause={
            "rejected": rejections,
            "all_accepted": len(accepted_counts) - rejections,
            "no_proposal_miss": num_empty,
        },
        overlap_sum=overlap * tested,
        num_overlap=tested,
        by_drafter={
            kind: DrafterCounts(k * len(accepted_counts), accepted, rejections, overlap * tested, tested)
        },
        acceptance_method=method,
    )


def record_of(request_id: str = "r", stats: SpeculationStats | None = None, **changes: Any) -> RequestRecord:
    """A request that ended well after a second and a half."""
    base = RequestRecord(
        request_id=request_id, started_at=NOON, domain="finance", tenant="t", outcome="ok", total_seconds=1.5,
        stage_seconds={"queue": 0.1, "embed": 0.02, "search": 0.03, "prefill": 0.3, "decode": 1.0},
        time_to_first_token_seconds=0.5, num_prompt_tokens=200, num_generated_tokens=40, stats=stats,
        target="smol", draft="d1", mode="lookahead",
    )  # fmt: skip
    return replace(base, **changes)


def simulated(
    rng: np.random.Generator,
    count: int,
    rate: float,
    *,
    start: float = NOON,
    span: float = 3600.0,
    **changes: Any,
) -> list[RequestRecord]:
    """Requests of ten rounds each whose own rates scatter about ``rate``, spread evenly over ``span``."""
    records = []
    for index in range(count):
        own = rng.beta(20 * rate, 20 * (1 - rate))
        accepted = [min(NUM_DRAFT_TOKENS, int(rng.geometric(1 - own)) - 1) for _ in range(10)]
        seconds = float(rng.lognormal(0.3, 0.4))
        values = {
            "started_at": start + span * index / count,
            "total_seconds": seconds,
            "stage_seconds": {"queue": 0.01, "prefill": 0.2 * seconds, "decode": 0.7 * seconds},
            "num_generated_tokens": sum(accepted) + 10,
        }
        records.append(record_of(f"r{start:.0f}-{index}", stats_of(accepted), **values, **changes))
    return records
