"""Two measurements side by side: is a difference in α beyond noise?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rag_service.measurement import POOLED, RequestOutcome, by_domain, figures, ratio_parts
from rag_service.statistics import Interval


@dataclass(frozen=True, slots=True)
class Difference:
    """α of ``after`` minus α of ``before`` with its 95 % interval; ``beyond_noise``: it excludes zero."""

    domain: str
    before: float | None
    after: float | None
    difference: float | None
    interval: Interval | None

    @property
    def beyond_noise(self) -> bool:
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    @property
    def sentence(self) -> str:
        """The finding in words."""
        if self.before is None or self.after is None or self.difference is None:
            return f"{self.domain}: nothing was tested on one side."
        verb = "stayed" if self.difference == 0 else "fell" if self.difference < 0 else "rose"
        certainty = "beyond noise" if self.beyond_noise else "within noise"
        margin = ""
        if self.interval is not None:
            low, high = self.interval
            margin = f" (difference {self.difference:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})"
        return f"{self.domain}: α {verb} from {self.before:.3f} to {self.after:.3f}, {certainty}{margin}."

    def as_dict(self) -> dict[str, object]:
        return {
            "domain": self.domain,
            "before": self.before,
            "after": self.after,
            "difference": self.difference,
            "interval": list(self.interval) if self.interval else None,
            "beyond_noise": self.beyond_noise,
            "sentence": self.sentence,
        }


def compare_acceptance(
    before: Sequence[RequestOutcome],
    after: Sequence[RequestOutcome],
    *,
    num_resamples: int = 2000,
    seed: int = 0,
) -> list[Difference]:
    """Differences pooled and by domain. The same questions are resampled together on both sides (paired)."""
    domains = list(dict.fromkeys([*by_domain(before), *by_domain(after)]))
    left, right = by_domain(before), by_domain(after)
    found = [_difference(POOLED, before, after, num_resamples, seed)]
    found += [
        _difference(domain, left.get(domain, []), right.get(domain, []), num_resamples, seed)
        for domain in domains
    ]
    return found


def _difference(
    domain: str,
    before: Sequence[RequestOutcome],
    after: Sequence[RequestOutcome],
    num_resamples: int,
    seed: int,
) -> Difference:
    left, right = figures(before).acceptance_rate, figures(after).acceptance_rate
    if left is None or right is None:
        return Difference(domain, left, right, None, None)
    counts = _paired(before, after)
    interval: Interval | None = None
    if len(counts) >= 2:
        rng = np.random.default_rng(seed)
        chosen = rng.integers(0, len(counts), (num_resamples, len(counts)))
        sums = counts[chosen].sum(axis=1)
        usable = (sums[:, 1] > 0) & (sums[:, 3] > 0)
        if usable.any():
            rates = sums[usable, 2] / sums[usable, 3] - sums[usable, 0] / sums[usable, 1]
            low, high = np.percentile(rates, [2.5, 97.5])
            interval = _widened((float(low), float(high)), right - left, len(counts))
    return Difference(domain, left, right, right - left, interval)


def _widened(found: Interval, difference: float, count: int) -> Interval:
    """Resampling a handful of questions claims too much: its margins are stretched to those of Student's law."""
    factor = float(stats.t.ppf(0.975, count - 1) / stats.norm.ppf(0.975)) * math.sqrt(count / (count - 1))
    low, high = found
    return difference - factor * (difference - low), difference + factor * (high - difference)


def _paired(
    before: Sequence[RequestOutcome], after: Sequence[RequestOutcome]
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """``[n, 4]``: accepted and tested before, accepted and tested after, of each question asked on both sides."""
    theirs = {outcome.prompt_id: outcome for outcome in after}
    rows = []
    for outcome in before:
        other = theirs.get(outcome.prompt_id)
        if other is not None:
            rows.append([*_counts(outcome), *_counts(other)])
    return np.asarray(rows, dtype=np.float64).reshape(-1, 4)


def _counts(outcome: RequestOutcome) -> tuple[float, float]:
    (accepted,), (tested,) = ratio_parts([outcome.stats])
    return accepted, tested
