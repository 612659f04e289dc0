"""The simulation's figures as a page: docs/simulation.md with plots, from ``results/simulate.json``.

Simulated speed-ups as points, the theory's lines dashed beside them (they hold for one sequence at a time).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from harness import RESULTS, ROOT
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

MODES = {"colocated": "#0072B2", "synchronous": "#D55E00", "lookahead": "#009E73"}
AUTO = "#000000"
IMAGES = ROOT / "docs" / "images"

Row = dict[str, Any]


def chosen(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def draw(name: str, panels: Sequence[tuple[str, str, Sequence[Row]]], over: str, *, log: bool = False) -> str:
    """One figure with a panel each (title, x label, rows); returns its path relative to docs/."""
    with matplotlib.rc_context({"svg.hashsalt": "rag-service", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(3.4 * len(panels), 3.0), layout="constrained")
        axes_of = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, label, rows) in zip(axes_of, panels, strict=True):
            panel(axes, rows, over)
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_xlabel(label)
            if log:
                axes.set_xscale("log", base=2)
                axes.set_xticks([row[over] for row in rows], [f"{row[over]:g}" for row in rows])
        axes_of[0].set_ylabel("speed over plain decoding")
        axes_of[0].legend(frameon=False, fontsize=8)
        FigureCanvasSVG(figure)
        IMAGES.mkdir(parents=True, exist_ok=True)
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    return f"images/{name}.svg"


def panel(axes: Axes, rows: Sequence[Row], over: str) -> None:
    x = [row[over] for row in rows]
    for mode, colour in MODES.items():
        axes.plot(x, [row[mode] for row in rows], "o-", color=colour, markersize=3.5, linewidth=1, label=mode)
        if all(f"{mode}_theory" in row for row in rows):
            axes.plot(x, [row[f"{mode}_theory"] for row in rows], "--", color=colour, linewidth=1)
    axes.plot(x, [row["auto"] for row in rows], "s", color=AUTO, markersize=2.5, label="auto (the default)")
    axes.axhline(1.0, color="#8a8a8a", linewidth=0.8)
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)


def table(rows: Sequence[Row], over: str, heading: str) -> list[str]:
    lines = [
        f"| {heading} | colocated | synchronous | look-ahead | hit rate | auto |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [_with_theory(row, mode) for mode in MODES]
        hits = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.2f}"
        lines.append(f"| {row[over]:g} | {' | '.join(cells)} | {hits} | {row['auto']:.2f} |")
    return lines


def _with_theory(row: Row, mode: str) -> str:
    theory = row.get(f"{mode}_theory")
    return f"{row[mode]:.2f}" + (f" ({theory:.2f})" if theory is not None else "")


def page(result: dict[str, Any]) -> str:
    rows: list[Row] = result["rows"]
    names = list(dict.fromkeys(row["hardware"] for row in rows))
    trips = sorted({row["round_trip_ms"] for row in rows})
    shares = sorted(row["auto"] / max(1.0, row["synchronous"], row["lookahead"]) for row in rows)
    slowest = result["slowest_auto_over_off"]
    middle_share = shares[len(shares) // 2]
    lines = [
        "# Beyond this machine: the simulation",
        "",
        "`python benchmarks/simulate.py`, then `python benchmarks/simulation_report.py`. The real scheduler,",
        "proposer, controller and messages under a simulated clock; only the two models are replaced, by step",
        "times and by chance α at every position (K is 3 below α .6, 8 from .8 on, 5 between).",
        "**No GPU was measured**: step times follow from bytes read a",
        "step and bandwidth, see `Hardware` in the script. In brackets, and dashed in the plots, the theory of",
        "one sequence (τ/(cK + v), with a round trip for synchronous, with the simulated hit rate for look-ahead).",
        "",
        f"{len(rows)} settings; `auto`, the default, has {slowest:.2f} of plain or more. Of",
        f"the best mode it may choose it has {middle_share:.2f} in the median and {shares[0]:.2f} at worst: the",
        "runs are short (192 tokens a sequence), so learning the costs and trying other modes weighs much.",
        "",
    ]
    for name in names:
        slug = name.split(" ")[0].lower()
        mine = [row for row in rows if row["hardware"] == name]
        near, far = trips[0], trips[-1]
        by_alpha = [
            (f"round trip {trip:g} ms", "α", chosen(mine, batch=1, round_trip_ms=trip))
            for trip in dict.fromkeys((near, trips[len(trips) // 2], far))
        ]
        middle = 0.7
        by_batch = [
            (f"round trip {trip:g} ms", "sequences at once", chosen(mine, alpha=middle, round_trip_ms=trip))
            for trip in dict.fromkeys((near, far))
        ]
        lines += [
            f"## {name}",
            "",
            f"![speed-up by α]({draw(f'simulation-{slug}-alpha', by_alpha, 'alpha')})",
            "",
        ]
        lines += [f"One sequence, round trip {near:g} ms:", "", *table(by_alpha[0][2], "alpha", "α"), ""]
        lines += [f"One sequence, α {middle}:", ""]
        lines += [*table(chosen(mine, batch=1, alpha=middle), "round_trip_ms", "round trip, ms"), ""]
        lines += [
            f"![speed-up by batch]({draw(f'simulation-{slug}-batch', by_batch, 'batch', log=True)})",
            "",
        ]
        lines += [
            f"α {middle}, round trip {near:g} ms:",
            "",
            *table(by_batch[0][2], "batch", "sequences"),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    result = json.loads((RESULTS / "simulate.json").read_text(encoding="utf-8"))
    target = Path(ROOT / "docs" / "simulation.md")
    target.write_text(page(result), encoding="utf-8")
    print(f"{target.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
