"""Has the acceptance rate of a domain changed, since when, and what changed with it?

Requests are pooled, in order of time, into batches; ``ruptures`` finds the change-points of the batches' rates
(penalised least squares), and ``scipy`` judges the last segment against the gated baseline, or without one
against the longest earlier segment. An alarm takes both significance and a difference that matters: with
enough requests everything is significant, and the questions of real users are never quite those of the gate.

It is asked again every few minutes, so the level is far below the usual five percent; benchmarks/drift.py
measures how often it cries wolf in stationary weeks and how late it is when the rate really falls.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import ruptures  # type: ignore[import-untyped]
from scipy import stats

from rag_service.acceptance_estimate import LOSSY_METHODS
from rag_service.acceptance_figures import sample_of
from rag_service.request_columns import RequestColumns
from rag_service.statistics import Values

DIMENSIONS: Final = ("target", "draft", "temperature", "mode", "drafter")
MIN_SPREAD: Final = 0.005
WINDOW_SECONDS: Final = 14 * 86_400.0
"""How far back the running check looks."""


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """How careful and how quick. Rates and tolerance are fractions, sizes numbers of tested requests."""

    batch_requests: int = 20
    max_batches: int = 300
    min_requests: int = 80
    penalty: float = 6.0
    """Times the logarithm of the number of batches, in units of the batches' variance."""
    level: float = 1e-4
    tolerance: float = 0.05
    """How far from its reference a rate may lie before it matters."""


@dataclass(frozen=True, slots=True)
class _Requests:
    """Requests that were tested, in order of time: numerator and denominator of each one's rate."""

    above: Values
    below: Values
    columns: RequestColumns

    def rate(self, part: slice = slice(None)) -> float:
        return float(self.above[part].sum() / self.below[part].sum())


DEFAULTS: Final = DriftSettings()


def detect_drift(
    columns: RequestColumns, baseline: float | None = None, settings: DriftSettings = DEFAULTS
) -> dict[str, Any] | None:
    """The drift that lasts at the end of the window, or None.

    ``columns``: one domain's requests in order of time. The answer has ``direction`` (``fell``, ``rose``),
    ``begun_at`` (Unix seconds; the first request of the last segment), ``begun_before_window`` (no
    change-point: it was so from the start), ``rate_before`` (the reference), ``rate_after``, ``reference``
    (``baseline`` or ``earlier``), ``p_value``, ``num_requests`` after it began, and ``changed``.
    """
    requests = _tested(columns)
    if len(requests.below) < settings.min_requests:
        return None
    starts = [0, *_change_points(requests, settings)]
    while len(starts) > 1 and not _differs(requests, slice(*starts[-2:]), slice(starts[-1], None), settings):
        starts.pop()  # a split of one level, which would make the drift begin too late
    last = slice(starts[-1], None)
    earlier = _longest([slice(a, b) for a, b in pairwise(starts)])
    if baseline is not None:
        reference, p_value = baseline, _against_baseline(requests, last, baseline, settings.tolerance)
    elif earlier is not None:
        reference, p_value = requests.rate(earlier), _against_earlier(requests, earlier, last)
    else:
        return None
    after = requests.rate(last)
    if p_value >= settings.level or abs(after - reference) < settings.tolerance:
        return None
    return {
        "direction": "fell" if after < reference else "rose",
        "begun_at": float(requests.columns.started_at[last][0]),
        "begun_before_window": earlier is None,
        "rate_before": reference,
        "rate_after": after,
        "reference": "baseline" if baseline is not None else "earlier",
        "p_value": p_value,
        "num_requests": len(requests.below[last]),
        "changed": _changed(requests, earlier, last) if earlier is not None else [],
    }


def _tested(columns: RequestColumns) -> _Requests:
    exact = columns.where(~np.isin(columns.names["acceptance_method"], (*LOSSY_METHODS, "")))
    sample = sample_of(exact)
    tested = sample.denominators > 0
    return _Requests(sample.numerators[tested], sample.denominators[tested], exact.where(tested))


def _change_points(requests: _Requests, settings: DriftSettings) -> list[int]:
    """Indices of the requests at which a new segment begins; [] when the rate held."""
    count = len(requests.below)
    size = max(settings.batch_requests, -(-count // settings.max_batches))
    edges = np.arange(0, count - size + 1, size)
    rates = np.add.reduceat(requests.above, edges) / np.add.reduceat(requests.below, edges)
    # Of the differences, by the median: the changes sought must not count as noise.
    spread = max(float(np.median(np.abs(np.diff(rates)))) / (0.6745 * np.sqrt(2)), MIN_SPREAD)
    found = ruptures.KernelCPD(kernel="linear", min_size=2).fit((rates / spread)[:, None])
    points = found.predict(pen=settings.penalty * np.log(len(rates)))
    return [int(edges[point]) for point in points if point < len(edges)]


def _longest(segments: list[slice]) -> slice | None:
    return max(segments, key=lambda part: part.stop - part.start, default=None)


def _against_baseline(requests: _Requests, last: slice, baseline: float, tolerance: float) -> float:
    """p-value of a rate within ``tolerance`` of the baseline, one-sided towards where it lies."""
    below = requests.rate(last) < baseline
    bound = baseline - tolerance if below else baseline + tolerance
    return _p_value(
        stats.ttest_1samp,
        requests.above[last] - bound * requests.below[last],
        0.0,
        alternative="less" if below else "greater",
    )


def _against_earlier(requests: _Requests, earlier: slice, last: slice) -> float:
    """p-value of one common rate, by Welch's test on the residuals from it."""
    both = np.r_[requests.above[earlier], requests.above[last]].sum()
    pooled = both / np.r_[requests.below[earlier], requests.below[last]].sum()
    residuals = requests.above - pooled * requests.below
    return _p_value(stats.ttest_ind, residuals[earlier], residuals[last], equal_var=False)


def _differs(requests: _Requests, before: slice, after: slice, settings: DriftSettings) -> bool:
    apart = abs(requests.rate(after) - requests.rate(before))
    return apart >= settings.tolerance and _against_earlier(requests, before, after) < settings.level


def _p_value(test: Any, *samples: Any, **options: Any) -> float:
    with warnings.catch_warnings():
        # Requests that are all alike have no variance; scipy warns and gives 0 or nan, both right here.
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(np.nan_to_num(test(*samples, **options).pvalue, nan=1.0))


def _changed(requests: _Requests, before: slice, after: slice) -> list[dict[str, Any]]:
    """What else changed: dimensions whose mix moved by a tenth or more, with the shares before and after.

    ``difference_within``: the change of the rate among requests alike in that dimension. Near 0, the mix
    explains the drift; None when nothing is alike (a new draft).
    """
    found = []
    for dimension in DIMENSIONS:
        values = requests.columns.names[dimension]
        known = sorted(set(values[before]) | set(values[after]))
        counts = np.array([[np.sum(values[part] == value) for value in known] for part in (before, after)])
        shares = counts / counts.sum(axis=1, keepdims=True)
        moved = 0.5 * float(np.abs(shares[0] - shares[1]).sum())
        if moved < 0.1 or len(known) < 2 or stats.chi2_contingency(counts).pvalue > 1e-3:
            continue
        found.append(
            {
                "dimension": dimension,
                "before": dict(zip(known, shares[0].tolist(), strict=True)),
                "after": dict(zip(known, shares[1].tolist(), strict=True)),
                "difference_within": _difference_within(requests, values, known, before, after),
            }
        )
    return sorted(found, key=lambda change: DIMENSIONS.index(change["dimension"]))


def _difference_within(
    requests: _Requests, values: npt.NDArray[np.object_], known: list[str], before: slice, after: slice
) -> float | None:
    total = weight = 0.0
    for value in known:
        alike = values == value
        above = [requests.above[part][alike[part]].sum() for part in (before, after)]
        below = [requests.below[part][alike[part]].sum() for part in (before, after)]
        if min(np.sum(alike[part]) for part in (before, after)) >= 10 and min(below) > 0:
            total += float((above[1] / below[1] - above[0] / below[0]) * below[1])
            weight += float(below[1])
    return total / weight if weight else None
