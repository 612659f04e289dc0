"""The acceptance report as one HTML file: plots inside, no script, no request to anywhere; fit to mail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from rag_service import plots
from rag_service.report_rendering import Tabular, date_of, drift_sentence, footnotes_of, tabulars_of

TEMPLATE = "report.html.j2"


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with a plot, a table, or both. ``stands_on`` says how many requests are behind it."""

    title: str
    stands_on: str
    svg: str = ""
    table: Tabular | None = None
    remark: str = ""


def html_of(report: Mapping[str, Any]) -> str:
    """A self-contained page; the report's time series is drawn when it has one (``bucket``)."""
    total = sum(f["num_requests"] for name, f in report["domains"].items() if name != "all") or sum(
        f["num_requests"] for f in report["domains"].values()
    )
    return page_of(
        "Acceptance report",
        f"{date_of(report['since'])} to {date_of(report['until'])}, {total} requests",
        list(_sections(report)) if total else [],
        [] if total else ["There were no requests in this window."],
    )


def page_of(title: str, subtitle: str, sections: list[Section], remarks: list[str]) -> str:
    """Fill the page's template; all text is escaped, plots are put in as they are."""
    shown = [
        {
            "title": section.title,
            "stands_on": section.stands_on,
            "svg": Markup(section.svg),  # drawn by ``plots``, which escapes text
            "table": section.table,
            "remark": section.remark,
        }
        for section in sections
    ]
    return _template().render(title=title, subtitle=subtitle, sections=shown, remarks=remarks)


def _sections(report: Mapping[str, Any]) -> Iterator[Section]:
    domains: dict[str, Any] = {
        name: figures for name, figures in report["domains"].items() if figures["num_requests"]
    }
    by_domain = ", ".join(f"{name} {figures['num_tested_requests']}" for name, figures in domains.items())
    tested = f"Requests with tested draft tokens: {by_domain}."
    acceptance, latency = tabulars_of(report)
    rows = [(name, figures["acceptance_rate"], figures["interval"]) for name, figures in domains.items()]
    yield Section(
        "Acceptance rate by domain", tested, plots.rates_with_intervals(rows, "α, 95 % interval"), acceptance,
        " ".join(footnotes_of(report)),
    )  # fmt: skip
    yield from _drifts(domains)
    series = {name: found for name, found in report.get("series", {}).get("domains", {}).items() if found}
    if series:
        baselines = {name: figures.get("baseline") for name, figures in domains.items()}
        yield Section(
            "Acceptance rate over time", "The band is the 95 % interval; dashed, the gated baseline.",
            plots.rates_over_time(series, baselines, (report["since"], report["until"])),
        )  # fmt: skip
    yield from _groups(report, domains)
    yield from _rounds(domains, tested)
    timed = ", ".join(f"{name} {figures['num_timed_requests']}" for name, figures in domains.items())
    percentiles = [(name, figures["latency_seconds"]) for name, figures in domains.items()]
    yield Section(
        "Latency", f"Requests that ended well: {timed}.",
        plots.percentiles_by_row(percentiles, "seconds, end to end"), latency,
    )  # fmt: skip


def _drifts(domains: Mapping[str, Any]) -> Iterator[Section]:
    for name, figures in domains.items():
        drift = figures.get("drift")
        if drift is None:
            continue
        sentence = drift_sentence(drift)
        yield Section(
            f"Drift in {name}",
            f"{drift['num_requests']} requests since it began.",
            remark=sentence[0].upper() + sentence[1:],
        )


def _groups(report: Mapping[str, Any], domains: Mapping[str, Any]) -> Iterator[Section]:
    names = [name for name in report["group_by"] if name != "domain"]
    rows = [
        (f"{domain}: {', '.join(str(group[name]) or '–' for name in names)} ({group['num_requests']})",
         group["acceptance_rate"], group["interval"])
        for domain, figures in domains.items() for group in figures.get("groups", [])
    ]  # fmt: skip
    if rows:
        yield Section(
            f"Compared by {' and '.join(names)}", "Requests in brackets.",
            plots.rates_with_intervals(rows, "α, 95 % interval"),
        )  # fmt: skip


def _rounds(domains: Mapping[str, Any], stands_on: str) -> Iterator[Section]:
    histograms = {
        name: [count / sum(figures["acceptance_histogram"]) for count in figures["acceptance_histogram"]]
        for name, figures in domains.items()
        if sum(figures["acceptance_histogram"])
    }
    if histograms:
        yield Section(
            "Accepted tokens a round", stands_on,
            plots.lines_by_position(histograms, "accepted draft tokens", "share of rounds", first=0),
        )  # fmt: skip
        conditional = {name: domains[name]["conditional_acceptance"] for name in histograms}
        yield Section(
            "Acceptance by position, given that it was tested", stands_on,
            plots.lines_by_position(conditional, "position in the proposal", "accepted / tested"),
        )  # fmt: skip
    causes = {name: figures["rounds_by_cause"] for name, figures in domains.items()}
    if any(causes.values()):
        yield Section("Rounds by how they ended", stands_on, plots.shares_by_row(causes))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(loader=jinja2.PackageLoader("rag_service", "templates"), autoescape=True)
    return environment.get_template(TEMPLATE)
