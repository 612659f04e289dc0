"""The figures of one group of requests: acceptance rate with interval, rounds, latencies.

Definitions and their reasons are those of docs/metrics.md. A figure with nothing behind it is None.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rag_service.acceptance_estimate import LOSSY_METHODS, AcceptanceSample, acceptance_sample
from rag_service.request_columns import RequestColumns
from rag_service.statistics import percentiles, pooled_ratio
from rag_service.telemetry import STAGES

Figures = dict[str, Any]


def figures_of(columns: RequestColumns, *, num_resamples: int = 2000, seed: int = 0) -> Figures:
    """Every figure of the group, keys as in ``GET /v1/acceptance``.

    Figures of speculation are of the requests verified exactly. Requests under a lossy rule estimate no
    acceptance rate: they are counted in ``num_lossy_requests``, and when there are no others the figures are
    theirs, ``lossy`` is true, ``acceptance_rate`` is None and ``lossy_acceptance_rate`` is given.
    """
    lossy = np.isin(columns.names["acceptance_method"], LOSSY_METHODS)
    verified = (
        columns.where(~lossy) if (~lossy & (columns.names["acceptance_method"] != "")).any() else columns
    )
    return {
        **acceptance_of(verified, num_resamples=num_resamples, seed=seed),
        "num_requests": len(columns),
        "num_lossy_requests": int(lossy.sum()),
        "outcomes": _counted(columns.names["outcome"]),
        **_rounds(verified),
        "num_generated_tokens": int(columns.counts["num_generated_tokens"].sum()),
        **latencies_of(columns),
    }


def acceptance_of(columns: RequestColumns, *, num_resamples: int = 2000, seed: int = 0) -> Figures:
    """Acceptance rate, its interval and its relatives."""
    counts = columns.counts
    sample = sample_of(columns)
    lossy = sample.estimator == "lossy"
    interval = sample.interval(num_resamples=num_resamples, seed=seed)
    return {
        "acceptance_rate": None if lossy else sample.rate,
        "interval": None if lossy or interval is None else list(interval),
        "estimator": None if lossy else sample.estimator,
        "lossy": lossy,
        "lossy_acceptance_rate": sample.rate if lossy else None,
        "mean_of_requests_acceptance_rate": None if lossy else sample.mean_of_requests,
        "num_tested_requests": sample.num_tested_requests,
        "overlap": pooled_ratio(counts["overlap_sum"], counts["num_overlap"]),
        "accepted_over_drafted": pooled_ratio(counts["num_accepted_tokens"], counts["num_draft_tokens"]),
        "num_draft_tokens": int(counts["num_draft_tokens"].sum()),
        "num_accepted_draft_tokens": int(counts["num_accepted_tokens"].sum()),
        "num_rejections": int(counts["num_rejections"].sum()),
    }


def latencies_of(columns: RequestColumns) -> Figures:
    """P50, P95 and P99 of requests that ended well, end to end, to the first token and by stage."""
    times = columns.times
    decode = times["decode"]
    timed = decode > 0
    return {
        "latency_seconds": percentiles(times["total"]),
        "time_to_first_token_seconds": percentiles(times["time_to_first_token"]),
        "stage_seconds": {stage: percentiles(times[stage]) for stage in STAGES if _any_known(times[stage])},
        "num_timed_requests": int(np.isfinite(times["total"]).sum()),
        "tokens_per_second": pooled_ratio(columns.counts["num_generated_tokens"][timed], decode[timed]),
    }


def sample_of(columns: RequestColumns) -> AcceptanceSample:
    """What the acceptance rate of these requests is estimated from."""
    speculated = columns.where(columns.names["acceptance_method"] != "")
    counts = speculated.counts
    return acceptance_sample(
        counts["num_accepted_tokens"],
        counts["num_rejections"],
        counts["overlap_sum"],
        counts["num_overlap"],
        list(speculated.names["acceptance_method"]),
    )


def _rounds(columns: RequestColumns) -> Figures:
    counts, positions = columns.counts, columns.positions
    num_rounds = counts["num_rounds"].sum()
    tested, accepted = (
        positions[name].sum(axis=0) for name in ("tested_per_position", "accepted_per_position")
    )
    hits, misses = counts["lookahead_hits"].sum(), counts["lookahead_misses"].sum()
    return {
        "mean_acceptance_length": (
            1.0 + float(counts["num_accepted_tokens"].sum() / num_rounds) if num_rounds else None
        ),
        "num_rounds": int(num_rounds),
        "rounds_by_cause": {
            cause: int(values.sum()) for cause, values in columns.causes.items() if values.any()
        },
        "conditional_acceptance": [
            float(accepted[i] / tested[i]) if i < len(accepted) and tested[i] else None
            for i in range(len(tested))
        ],
        "tested_per_position": [int(count) for count in tested],
        "acceptance_histogram": [int(count) for count in positions["acceptance_histogram"].sum(axis=0)],
        "lookahead_hit_rate": float(hits / (hits + misses)) if hits + misses else None,
    }


def _counted(values: Any) -> dict[str, int]:
    found, counts = np.unique(values.astype(str), return_counts=True)
    return {str(value): int(count) for value, count in zip(found, counts, strict=True)}


def _any_known(values: Any) -> bool:
    return bool(np.isfinite(values).any())
