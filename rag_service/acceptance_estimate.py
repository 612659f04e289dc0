"""Which estimator of the acceptance rate a set of requests allows, and its value.

α = E[Σ min(target, draft)]. Token-wise verification estimates it by accepted / (accepted + rejections), since
each tested position is accepted with exactly that probability. Under block verification a position's fate
depends on its block, so only the measured overlap estimates α. Under a lossy rule neither does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rag_service.statistics import Interval, Values, mean_of_ratios, pooled_ratio, ratio_interval

Estimator = Literal["accepted_over_tested", "overlap", "lossy"]
LOSSY_METHODS = ("threshold", "typical")


@dataclass(frozen=True, slots=True)
class AcceptanceSample:
    """One value a request, ``[n]`` each: what an acceptance rate and its interval are computed from."""

    estimator: Estimator
    numerators: Values
    denominators: Values

    @property
    def num_tested_requests(self) -> int:
        """Requests with at least one tested position: those that stand behind the figure."""
        return int(np.count_nonzero(self.denominators > 0))

    @property
    def rate(self) -> float | None:
        """The pooled figure; None when nothing was tested."""
        return pooled_ratio(self.numerators, self.denominators)

    @property
    def mean_of_requests(self) -> float | None:
        return mean_of_ratios(self.numerators, self.denominators)

    def interval(self, *, num_resamples: int = 2000, seed: int = 0) -> Interval | None:
        return ratio_interval(self.numerators, self.denominators, num_resamples=num_resamples, seed=seed)


def acceptance_sample(
    accepted: npt.ArrayLike,
    rejections: npt.ArrayLike,
    overlap_sum: npt.ArrayLike,
    num_overlap: npt.ArrayLike,
    methods: Sequence[str],
) -> AcceptanceSample:
    """The sample of the requests verified exactly, or of all of them, labelled lossy, if none was.

    All arguments hold one entry a request. A mixture of token-wise and block verification is estimated by
    the overlap, the one estimator valid under both.
    """
    names = np.asarray(methods, dtype=object)
    lossy = np.isin(names, LOSSY_METHODS)
    kept = ~lossy if (~lossy).any() else np.ones(len(names), dtype=bool)
    estimator: Estimator = "accepted_over_tested"
    if len(names) and lossy.all():
        estimator = "lossy"
    elif (names[kept] == "block").any():
        estimator = "overlap"
    if estimator == "overlap":
        above, below = _kept(overlap_sum, kept), _kept(num_overlap, kept)
    else:
        above = _kept(accepted, kept)
        below = above + _kept(rejections, kept)
    return AcceptanceSample(estimator, above, below)


def _kept(values: npt.ArrayLike, kept: npt.NDArray[np.bool_]) -> Values:
    return np.asarray(values, dtype=np.float64)[kept]
