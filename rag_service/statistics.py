"""Intervals and percentiles behind the published figures, on scipy and numpy.

A request is the unit that is resampled: the tokens of one request are correlated, so an interval over tokens
would be far too narrow (speculation.md, section 3).
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy import stats

Values = npt.NDArray[np.float64]
Interval = tuple[float, float]

LEVEL: Final = 0.95
PERCENTILES: Final = (50, 95, 99)
MAX_UNITS: Final = 2000
"""Above this many requests they are first pooled, at random, into this many groups of nearly equal size. The
groups are independent too, so resampling them gives the same interval at a bounded cost."""
_BATCH_CELLS: Final = 2_000_000


def pooled_ratio(numerators: npt.ArrayLike, denominators: npt.ArrayLike) -> float | None:
    """Σ numerators / Σ denominators; None when nothing stands below the line."""
    below = float(np.sum(np.asarray(denominators, dtype=np.float64)))
    return float(np.sum(np.asarray(numerators, dtype=np.float64))) / below if below > 0 else None


def mean_of_ratios(numerators: npt.ArrayLike, denominators: npt.ArrayLike) -> float | None:
    """The mean over requests of each request's own ratio; None when no request has one."""
    above, below = _informative(numerators, denominators)
    return float(np.mean(above / below)) if len(above) else None


def ratio_interval(
    numerators: npt.ArrayLike,
    denominators: npt.ArrayLike,
    *,
    level: float = LEVEL,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """Percentile-bootstrap interval of the pooled ratio, resampling requests.

    ``numerators`` and ``denominators``: one value a request, ``[n]``. Requests with a denominator of 0 carry
    no information and are left out. None with fewer than two requests. Where every request has the ratio 0,
    or every one 1, resampling would claim certainty; the exact binomial interval with one trial a request is
    given instead, which is wider than the truth rather than narrower.
    """
    above, below = _informative(numerators, denominators)
    if len(above) < 2:
        return None
    if np.array_equal(above, below) or not above.any():
        return _all_or_none(int(above.any()) * len(above), len(above), level)
    rng = np.random.default_rng(seed)
    above, below = _grouped(above, below, rng)
    result = stats.bootstrap(
        (above, below),
        _ratio_of_sums,
        paired=True,
        vectorized=True,
        confidence_level=level,
        n_resamples=num_resamples,
        batch=max(1, _BATCH_CELLS // len(above)),
        method="percentile",
        rng=rng,
    )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _informative(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Both as arrays, without the requests whose denominator is 0: they say nothing of the ratio."""
    above = np.asarray(numerators, dtype=np.float64)
    below = np.asarray(denominators, dtype=np.float64)
    known = below > 0
    return above[known], below[known]


def cautious_ratio_interval(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, level: float = LEVEL
) -> Interval | None:
    """The wider of ``ratio_interval`` and Student's interval of the ratio, for decisions on few requests.

    Resampling two to ten requests gives intervals that are too narrow: of rates exactly at a bar it lets 30 % of
    samples of two through and 7 % of eight, where 2.5 % are promised; Student's lets 4 % through.
    """
    found = ratio_interval(numerators, denominators, level=level)
    if found is None:
        return None
    above, below = _informative(numerators, denominators)
    rate = float(above.sum() / below.sum())
    residuals = above - rate * below
    error = math.sqrt(float(np.sum(residuals**2)) / (len(above) - 1) / len(above)) / float(below.mean())
    margin = float(stats.t.ppf(0.5 + level / 2, len(above) - 1)) * error
    return max(0.0, min(found[0], rate - margin)), min(1.0, max(found[1], rate + margin))


def mean_interval(
    values: npt.ArrayLike, *, level: float = LEVEL, num_resamples: int = 2000, seed: int = 0
) -> Interval | None:
    """Percentile-bootstrap interval of a mean over requests; None with fewer than two."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 2:
        return None
    if np.ptp(data) == 0:
        return float(data[0]), float(data[0])
    rng = np.random.default_rng(seed)
    data, sizes = _grouped(data, np.ones_like(data), rng)
    result = stats.bootstrap(
        (data, sizes), _ratio_of_sums, paired=True, vectorized=True, confidence_level=level,
        n_resamples=num_resamples, batch=max(1, _BATCH_CELLS // len(data)), method="percentile", rng=rng,
    )  # fmt: skip
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def speed_up(
    base: tuple[npt.ArrayLike, npt.ArrayLike],
    other: tuple[npt.ArrayLike, npt.ArrayLike],
    *,
    level: float = LEVEL,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float | None, Interval | None]:
    """The pooled rate of ``other`` in multiples of that of ``base``, with its interval, resampling pairs.

    Each is (amounts, seconds), one value a pair, ``[n]``: entry i of both belongs to the same question.
    """
    parts = [np.asarray(values, dtype=np.float64) for values in (*base, *other)]
    if not len(parts[0]) or min(part.sum() for part in parts) <= 0:
        return None, None
    estimate = float(_ratio_of_rates(parts[0], parts[1], parts[2], parts[3]))
    if len(parts[0]) < 2 or all(np.ptp(part) == 0 for part in parts):
        return estimate, None
    found = stats.bootstrap(
        tuple(parts), _ratio_of_rates, paired=True, vectorized=True, confidence_level=level,
        n_resamples=num_resamples, batch=max(1, _BATCH_CELLS // len(parts[0])), method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return estimate, (float(found.low), float(found.high))


def percentiles(values: npt.ArrayLike) -> dict[str, float | None]:
    """``{"p50", "p95", "p99"}`` of the values (linear interpolation), None each when there are none."""
    data = np.asarray(values, dtype=np.float64)
    data = data[np.isfinite(data)]
    if not len(data):
        return {f"p{percent}": None for percent in PERCENTILES}
    found = np.percentile(data, PERCENTILES)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}


def percentile_interval(values: npt.ArrayLike, percent: float, *, level: float = LEVEL) -> Interval | None:
    """Distribution-free interval of a percentile from order statistics.

    None when the sample is too small to bound that percentile on both sides (P99 takes some hundreds).
    """
    data = np.asarray(values, dtype=np.float64)
    data = data[np.isfinite(data)]
    if len(data) < 2:
        return None
    bounds = stats.quantile_test(data, q=float(np.percentile(data, percent)), p=percent / 100)
    interval: Any = bounds.confidence_interval(level)
    low, high = float(interval.low), float(interval.high)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _ratio_of_sums(above: Values, below: Values, axis: int = -1) -> Values:
    return np.asarray(np.sum(above, axis=axis) / np.sum(below, axis=axis))


def _ratio_of_rates(
    base_amounts: Values, base_seconds: Values, amounts: Values, seconds: Values, axis: int = -1
) -> Values:
    base = np.sum(base_amounts, axis=axis) / np.sum(base_seconds, axis=axis)
    return np.asarray(np.sum(amounts, axis=axis) / np.sum(seconds, axis=axis) / base)


def _grouped(above: Values, below: Values, rng: np.random.Generator) -> tuple[Values, Values]:
    count = len(above)
    if count <= MAX_UNITS:
        return above, below
    group = rng.permutation(count) % MAX_UNITS
    return _sums(group, above), _sums(group, below)


def _sums(group: npt.NDArray[np.int64], values: Values) -> Values:
    return np.bincount(group, weights=values, minlength=MAX_UNITS).astype(np.float64)


def _all_or_none(num_successes: int, num_requests: int, level: float) -> Interval:
    interval = stats.binomtest(num_successes, num_requests).proportion_ci(level, method="exact")
    return float(interval.low), float(interval.high)
