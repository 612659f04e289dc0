"""Plots as SVG text, for pages that must work in a mail and without scripts.

Drawn by matplotlib's object interface, so no display, no global state, and the same bytes for the same
figures. Colours: Okabe and Ito's set, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A", "#000000")
GREY: Final = "#8a8a8a"
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rag-service",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}


def rates_over_time(
    series: Mapping[str, Sequence[Mapping[str, Any]]],
    baselines: Mapping[str, float | None],
    window: tuple[float, float],
) -> str:
    """α of each domain over a window of time (Unix seconds), a small panel each.

    With its interval as a band and its baseline dashed.
    """
    with matplotlib.rc_context(_STYLE):
        columns = 2 if len(series) > 1 else 1
        rows = math.ceil(len(series) / columns)
        figure = Figure(figsize=(9.0, 0.6 + 1.7 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in panels.flat[len(series) :]:
            axes.set_visible(False)
        for axes, (name, buckets) in zip(panels.flat, series.items(), strict=False):
            _rate_panel(axes, buckets, baselines.get(name))
            axes.set_title(f"{plain(name)}, {sum(b['num_requests'] for b in buckets)} requests")
        # The first bucket may begin before the window, as buckets are aligned to the clock.
        first = min([window[0], *(bucket["start"] for buckets in series.values() for bucket in buckets)])
        ends: Any = [datetime.fromtimestamp(at, tz=UTC) for at in (first, window[1])]
        panels[0, 0].set_xlim(*ends)
        for axes in panels[:, 0]:
            axes.set_ylabel("α")
        return _svg(figure)


def rates_with_intervals(rows: Sequence[tuple[str, float | None, Sequence[float] | None]], unit: str) -> str:
    """One point a row with its interval, on a scale from 0 to 1 or to the largest value."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _rows_figure(len(rows))
        for index, (_, value, interval) in enumerate(rows):
            if interval is not None:
                axes.plot(
                    list(interval), [index, index], color=COLOURS[0], linewidth=2, solid_capstyle="butt"
                )
            if value is not None:
                axes.plot([value], [index], "o", color=COLOURS[0], markersize=5)
        _name_rows(axes, [name for name, _, _ in rows])
        axes.set_xlabel(unit)
        return _svg(figure)


def percentiles_by_row(rows: Sequence[tuple[str, Mapping[str, float | None]]], unit: str) -> str:
    """P50, P95 and P99 of each row on one scale that starts at 0."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _rows_figure(len(rows))
        for marker, colour, key in zip("os^", COLOURS, ("p50", "p95", "p99"), strict=False):
            heights = [_known(values.get(key)) for _, values in rows]
            axes.plot(heights, range(len(rows)), marker, color=colour, label=key.upper())
        for index, (_, values) in enumerate(rows):
            ends = [_known(values.get("p50")), _known(values.get("p99"))]
            axes.plot(ends, [index, index], color=GREY, linewidth=0.8, zorder=1)
        _name_rows(axes, [name for name, _ in rows])
        axes.set_xlim(left=0)
        axes.set_xlabel(unit)
        axes.legend(ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0)
        return _svg(figure)


def lines_by_position(
    series: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str, first: int = 1
) -> str:
    """One line a name over consecutive positions; unknown values leave a gap."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.0, 2.8), layout="constrained")
        axes = figure.subplots()
        for colour, (name, values) in zip(_colours(len(series)), series.items(), strict=True):
            heights = [_known(value) for value in values]
            axes.plot(range(first, first + len(heights)), heights, "o-", color=colour, label=plain(name))
        longest = max((len(values) for values in series.values()), default=0)
        axes.set_xticks(range(first, first + longest))
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom=0)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return _svg(figure)


def shares_by_row(rows: Mapping[str, Mapping[str, int]]) -> str:
    """Each row's counts as shares of its total, stacked to 1."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _rows_figure(len(rows))
        kinds = list(dict.fromkeys(kind for counts in rows.values() for kind in counts))
        left = [0.0] * len(rows)
        for colour, kind in zip(_colours(len(kinds)), kinds, strict=True):
            widths = [counts.get(kind, 0) / max(1, sum(counts.values())) for counts in rows.values()]
            axes.barh(range(len(rows)), widths, left=left, height=0.6, color=colour, label=plain(kind))
            left = [a + b for a, b in zip(left, widths, strict=True)]
        _name_rows(axes, list(rows))
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of rounds")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return _svg(figure)


def plain(text: str) -> str:
    """Text that matplotlib shows as it is, dollar signs included."""
    return text.replace("$", r"\$")[:60] or "–"


def _rate_panel(axes: Axes, buckets: Sequence[Mapping[str, Any]], baseline: float | None) -> None:
    known = [bucket for bucket in buckets if bucket["acceptance_rate"] is not None]
    times = [datetime.fromtimestamp(bucket["start"], tz=UTC) for bucket in known]
    x: Any = times
    bounded = [bucket["interval"] or [bucket["acceptance_rate"]] * 2 for bucket in known]
    axes.fill_between(
        x,
        [low for low, _ in bounded],
        [high for _, high in bounded],
        color=COLOURS[0],
        alpha=0.18,
        linewidth=0,
    )
    axes.plot(x, [bucket["acceptance_rate"] for bucket in known], "o-", color=COLOURS[0], markersize=2.5)
    if baseline is not None:
        axes.axhline(baseline, color=COLOURS[1], linestyle="--", linewidth=1)
    axes.set_ylim(0, 1)
    locator = AutoDateLocator(maxticks=6)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _rows_figure(num_rows: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.0, 0.9 + 0.32 * max(1, num_rows)), layout="constrained")
    return figure, figure.subplots()


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [plain(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    FigureCanvasSVG(figure)
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
