"""What a load showed: latencies with intervals, tokens a second, acceptance by domain, errors, arms compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from rag_service.acceptance_estimate import acceptance_sample
from rag_service.load import LoadResult, Sample
from rag_service.statistics import PERCENTILES, mean_of_ratios, percentile_interval, percentiles, speed_up
from rag_service.telemetry import STAGES

BASE_ARM: Final = "off"
Figures = dict[str, Any]


def load_report(result: LoadResult) -> Figures:
    """``arms`` → figures; ``paired`` compares every other arm with ``off`` on the same questions."""
    plan = result.plan
    arms = {name: [sample for sample in result.samples if sample.arm == name] for name in plan.arms}
    report: Figures = {
        "url": plan.url,
        "model": plan.model,
        "loop": "closed" if plan.rate is None else "open",
        "concurrency": plan.concurrency,
        "rate": plan.rate,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "num_requests": len(result.samples),
        "num_errors": sum(sample.error is not None for sample in result.samples),
        "ended_early": result.ended_early,
        "arms": {name: _arm(samples, result.busy_seconds[name]) for name, samples in arms.items()},
    }
    if BASE_ARM in arms and len(arms) > 1:
        base = arms[BASE_ARM]
        report["paired"] = {
            name: _paired(base, samples) for name, samples in arms.items() if name != BASE_ARM
        }
    return report


def _arm(samples: Sequence[Sample], busy_seconds: float) -> Figures:
    good = [sample for sample in samples if sample.error is None]
    num_tokens = sum(sample.num_tokens for sample in good)
    domains = sorted({sample.domain for sample in good})
    stages = [stage for stage in STAGES if any(f"{stage}_seconds" in sample.timings for sample in good)]
    return {
        "num_requests": len(samples),
        "num_good": len(good),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "requests_per_second": len(good) / busy_seconds if busy_seconds else None,
        "tokens_per_second": num_tokens / busy_seconds if busy_seconds else None,
        "num_generated_tokens": num_tokens,
        "latency_seconds": _percentiles([sample.total_seconds for sample in good]),
        "time_to_first_token_seconds": _percentiles(
            [sample.first_token_seconds for sample in good if sample.first_token_seconds is not None]
        ),
        "stage_seconds": {stage: _percentiles(_stage(good, stage)) for stage in stages},
        **_acceptance(good),
        "domains": {
            domain or "inferred": _acceptance([sample for sample in good if sample.domain == domain])
            for domain in domains
        },
    }


def _percentiles(values: Sequence[float]) -> Figures:
    intervals = {f"p{percent}_interval": percentile_interval(values, percent) for percent in PERCENTILES}
    found: Figures = dict(percentiles(values))
    return found | {name: interval and list(interval) for name, interval in intervals.items()}


def _stage(samples: Sequence[Sample], stage: str) -> list[float]:
    name = f"{stage}_seconds"
    return [sample.timings[name] for sample in samples if name in sample.timings]


def _acceptance(samples: Sequence[Sample]) -> Figures:
    """As in the acceptance report; under block verification the mean of the requests' own overlaps."""
    speculated = [sample.speculation for sample in samples if sample.speculation.get("num_draft_tokens")]
    methods = [str(found.get("acceptance_method", "token")) for found in speculated]
    accepted = [found.get("num_accepted_draft_tokens", 0) for found in speculated]
    rejections = [found.get("num_rejections", 0) for found in speculated]
    rates = [found.get("acceptance_rate") or 0.0 for found in speculated]
    known = [float(found.get("acceptance_rate") is not None) for found in speculated]
    sample = acceptance_sample(accepted, rejections, rates, known, methods)
    interval = sample.interval()
    lossy = sample.estimator == "lossy"
    overlap = sample.estimator == "overlap"
    rate = mean_of_ratios(sample.numerators, sample.denominators) if overlap else sample.rate
    rounds = sum(found.get("num_rounds", 0) for found in speculated)
    drafted = sum(found["num_draft_tokens"] for found in speculated)
    return {
        "acceptance_rate": None if lossy else rate,
        "interval": None if lossy or interval is None else list(interval),
        "estimator": None if lossy else ("mean_overlap_of_requests" if overlap else sample.estimator),
        "lossy": lossy,
        "accepted_over_drafted": sum(accepted) / drafted if drafted else None,
        "mean_acceptance_length": 1 + sum(accepted) / rounds if rounds else None,
        "num_requests": len(samples),
        "num_tested_requests": sample.num_tested_requests,
    }


def _paired(base: Sequence[Sample], other: Sequence[Sample]) -> Figures:
    """Speed-ups of ``other`` over ``base`` on the questions that both answered."""
    by_pair = {sample.pair: sample for sample in base if sample.error is None}
    pairs = [(by_pair[found.pair], found) for found in other if found.error is None and found.pair in by_pair]
    found: Figures = {
        "num_pairs": len(pairs),
        "same_text": sum(a.text == b.text for a, b in pairs) / len(pairs) if pairs else None,
    }
    for name, seconds in (("decode", "decode_seconds"), ("end_to_end", None)):
        timed = [
            (a, b) for a, b in pairs if seconds is None or (seconds in a.timings and seconds in b.timings)
        ]
        value, interval = speed_up(
            *(
                (
                    np.array([pair[side].num_tokens for pair in timed], dtype=float),
                    np.array([_seconds(pair[side], seconds) for pair in timed], dtype=float),
                )
                for side in (0, 1)
            )
        )
        found[f"{name}_speed_up"] = {"value": value, "interval": interval and list(interval)}
    return found


def _seconds(sample: Sample, name: str | None) -> float:
    return sample.total_seconds if name is None else sample.timings[name]
