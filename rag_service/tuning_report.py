"""A sweep as one HTML page: table, plots (inline SVG), recommendation."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment

from rag_service.tuning import Costs, TuningResult

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tuning of speculative decoding</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .6rem; border-bottom: 1px solid #bbb; }
td { text-align: right; font-variant-numeric: tabular-nums; } td.text { text-align: left; }
tr.best { background: #e2f3e4; } figure { margin: 1.5rem 0; } svg { max-width: 100%; height: auto; }
</style></head><body>
<h1>Tuning of speculative decoding</h1>
<p>{{ note }}</p>
<p><strong>Recommended: {{ best }}</strong></p>
{% for title, svg in plots %}<figure><figcaption>{{ title }}</figcaption>{{ svg | safe }}</figure>{% endfor %}
<table><thead><tr>{% for name in head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr{% if row.best %} class="best"{% endif %}>
{% for cell in row.cells %}<td{% if loop.index <= 2 %} class="text"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
<p>{{ costs }}</p>
</body></html>
"""

HEAD = (
    "mode",
    "draft",
    "K",
    "branches",
    "T",
    "accept",
    "α",
    "τ",
    "speed-up",
    "predicted",
    "tokens/s",
    "P95 s",
)


def cells(result: TuningResult) -> list[str]:
    """A result as the cells of a table row, under ``HEAD``."""
    setup, found = result.setup, result.figures
    interval = result.speed_up_interval
    speed = number(result.speed_up) + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")
    return [
        setup.mode if setup.mode in ("off", "passages") or setup.passages else f"{setup.mode}, model alone",
        result.draft or "none",
        "" if setup.mode == "off" else str(setup.num_draft_tokens),
        str(setup.branch_budget) if setup.mode == "lookahead" else "",
        f"{setup.temperature:g}",
        setup.acceptance + (" (lossy)" if result.lossy else ""),
        number(found.acceptance_rate, 3),
        number(found.mean_acceptance_length),
        speed,
        number(result.predicted),
        number(found.tokens_per_second, 1),
        number(result.p95_seconds),
    ]


def title_of(result: TuningResult) -> str:
    """A result in words: mode, draft and K."""
    if result.setup.mode == "off":
        return "plain decoding"
    mode, draft = cells(result)[:2]
    named = "" if result.setup.mode == "passages" else f" with {draft}"
    return f"{mode}{named}, K = {result.setup.num_draft_tokens}"


def number(value: float | None, digits: int = 2) -> str:
    """A figure for people; none where there is none."""
    return "none" if value is None else f"{value:.{digits}f}"


def render(results: Sequence[TuningResult], best: TuningResult, costs: Mapping[str, Costs], note: str) -> str:
    """The whole page as text."""
    rows = [{"cells": cells(result), "best": result is best} for result in results]
    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            note=note,
            best=title_of(best),
            plots=[
                ("Speed-up over plain decoding, by K", _figure(lambda axes: _by_k(axes, results))),
                ("Predicted beside measured", _figure(lambda axes: _predicted(axes, results))),
            ],
            head=HEAD,
            rows=rows,
            costs=costs_text(costs),
        )
    )


def costs_text(costs: Mapping[str, Costs]) -> str:
    """What a target pass of each width costs, and a step of each draft, also as a share of a target step."""
    first = next(iter(costs.values()))
    one = first.verify(1)
    shown = [f"target pass of width {w} {s * 1000:.1f} ms" for w, s in sorted(first.verify_seconds.items())]
    shown += [
        f"step of {name} {cost.draft_seconds * 1000:.1f} ms (c = {cost.draft_seconds / one:.2f})"
        for name, cost in costs.items()
        if cost.draft_seconds is not None
    ]
    return f"Costs measured after {first.context} tokens: {'; '.join(shown)}."


def _figure(draw: Callable[[Any], None]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    draw(figure.subplots())
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _by_k(axes: Any, results: Sequence[TuningResult]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if result.speed_up is None or result.setup.mode == "off":
            continue
        name = f"{cells(result)[0]} {result.draft} T={result.setup.temperature:g} {result.setup.acceptance}"
        lines.setdefault(name, []).append((result.setup.num_draft_tokens, result.speed_up))
    for name, points in sorted(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xlabel("draft tokens a round, K")
    axes.set_ylabel("speed-up")
    if lines:
        axes.legend(fontsize="small")


def _predicted(axes: Any, results: Sequence[TuningResult]) -> None:
    points = [
        (r.predicted, r.speed_up) for r in results if r.predicted is not None and r.speed_up is not None
    ]
    axes.scatter([left for left, _ in points], [right for _, right in points])
    top = max([1.0, *(max(point) for point in points)]) * 1.05
    axes.plot([0, top], [0, top], color="grey", linewidth=1)
    axes.set_xlabel("predicted speed-up")
    axes.set_ylabel("measured speed-up")
