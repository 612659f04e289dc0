"""A distillation as one HTML page: curves, α by domain before and after, settings, data fingerprints."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from generation.distillation.offline import OfflineAcceptance
from rag_service.distilling import DistillationResult, Line
from rag_service.report_html import Section, page_of
from rag_service.report_rendering import Tabular


def training_page(
    result: DistillationResult, settings: Mapping[str, Any], verified: Mapping[str, Any] | None = None
) -> str:
    """The report. ``verified``: what ``draft evaluate`` measured with the finished draft, if it was run."""
    stands_on = f"{result.num_held_out} held-out prompts"
    sections = [
        Section("Acceptance while training", stands_on, svg=alpha_curve(result.log)),
        Section("Loss and overlap on training batches", "training batches", svg=loss_curve(result.log)),
        Section(
            "Acceptance before and after, by domain and temperature",
            f"{stands_on}, the target's own answers given (teacher-forced)",
            table=before_and_after(result),
        ),
    ]
    if verified:
        sections.append(
            Section(
                "Acceptance by the service's verifier",
                f"{verified['pooled']['num_requests']} requests",
                table=verified_table(verified),
            )
        )
    sections.append(Section("Settings", "", table=_settings(settings, result)))
    subtitle = (
        f"{result.num_training} training prompts, {result.num_answer_tokens} tokens of the target's answers"
    )
    return page_of("Distillation of a draft", subtitle, sections, [])


def before_and_after(result: DistillationResult) -> Tabular:
    """One row a domain and temperature."""
    rows = []
    for name, after in result.after.items():
        domain, temperature = name.rsplit("/", 1)
        rows.append(
            [
                domain,
                temperature,
                _rate(result.before.get(name)),
                _rate(after),
                _rate(result.quantised.get(name)),
                str(after.num_tokens),
            ]
        )
    return Tabular(
        "Acceptance", ["domain", "temperature", "before", "after", "after, as saved", "tokens"], rows
    )


def verified_table(table: Mapping[str, Any]) -> Tabular:
    """The table of ``draft evaluate`` as text."""
    rows = []
    for name, figures in {"all": table["pooled"], **table["domains"]}.items():
        interval = figures["interval"]
        rows.append(
            [
                name,
                _number(figures["acceptance_rate"]),
                f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "none",
                _number(figures["mean_acceptance_length"]),
                str(figures["num_requests"]),
            ]
        )
    return Tabular("Verified", ["domain", "α", "95 % interval", "tokens a round", "requests"], rows)


def alpha_curve(log: Sequence[Line]) -> str:
    """α on held-out prompts over steps, pooled and by domain, as SVG."""
    points = [line for line in log if "eval_alpha" in line]
    names = sorted({name for line in points for name in line if name.startswith("eval_alpha_")})
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for name in names:
        drawn = [(line["step"], line[name]) for line in points if name in line]
        label = name.removeprefix("eval_alpha_").replace("_t", " at T=")
        width = 2.2 if label.startswith("all") else 0.9
        axes.plot(*zip(*drawn, strict=True), marker=".", linewidth=width, label=label)
    for name in sorted({name for line in points for name in line if name.startswith("eval_verified_")}):
        drawn = [(line["step"], line[name]) for line in points if name in line]
        axes.plot(*zip(*drawn, strict=True), "k--", linewidth=1.2, marker="x", label=verified_name(name))
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("acceptance")
    if names:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    return _svg(figure)


def verified_name(name: str) -> str:
    """``eval_verified_alpha_t0.7`` for people."""
    symbol = name.removeprefix("eval_verified_").replace("alpha", "α̂").replace("overlap", "β̂")
    return f"verifier {symbol}".replace("_t", " at T=")


def loss_curve(log: Sequence[Line]) -> str:
    """Training loss and overlap over steps, as SVG."""
    figure = Figure(figsize=(9.0, 2.8), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    for axes, name, colour in ((left, "loss", "#1f5fa8"), (right, "overlap", "#c05a1a")):
        points = [(line["step"], line[name]) for line in log if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour)
        axes.set_ylabel(name, color=colour)
    left.set_xlabel("step")
    return _svg(figure)


def _settings(settings: Mapping[str, Any], result: DistillationResult) -> Tabular:
    rows = [[name, json.dumps(value, ensure_ascii=False)] for name, value in _flat(settings)]
    rows.append(["data fingerprint", result.data_fingerprint])
    return Tabular("Settings", ["setting", "value"], rows)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``training.learning_rate`` and its like, one a row: a nested object on one line runs off the page."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _rate(figures: OfflineAcceptance | None) -> str:
    return "none" if figures is None else _number(figures.alpha)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
