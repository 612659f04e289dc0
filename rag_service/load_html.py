"""The load report for people: a page with plots, and tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rag_service import plots
from rag_service.report_html import Section, page_of
from rag_service.report_rendering import NONE_MARK, Tabular, number


def load_html_of(report: Mapping[str, Any]) -> str:
    """A self-contained page."""
    return page_of(
        "Load report",
        f"{report['url']}, {report['model']}: {load_of(report)}, {report['num_requests']} requests,"
        f" {report['num_errors']} errors",
        list(_sections(report)),
        ["The run was ended by its time limit; figures are of what was done by then."]
        if report["ended_early"]
        else [],
    )


def load_of(report: Mapping[str, Any]) -> str:
    """The load in words."""
    if report["loop"] == "closed":
        return f"closed loop of {report['concurrency']}"
    return f"open loop of {report['rate']:g} a second"


def load_tabulars(report: Mapping[str, Any]) -> list[Tabular]:
    """Tables of text: arms, latency by stage, acceptance by domain, arms compared."""
    arms: Mapping[str, Any] = report["arms"]
    found = [
        Tabular(
            f"Load: {load_of(report)}",
            ["arm", "requests", "errors", "req/s", "tok/s", "α", "95 % interval", "mean length"],
            [
                [
                    name,
                    str(arm["num_requests"]),
                    _errors(arm["errors"]),
                    number(arm["requests_per_second"], 2),
                    number(arm["tokens_per_second"], 1),
                    *_acceptance_cells(arm),
                ]
                for name, arm in arms.items()
            ],
        ),
        Tabular(
            "Latency in seconds, 95 % intervals in brackets",
            ["arm", "stage", "P50", "P95", "P99"],
            [
                [name, stage, *(_bounded(values, key) for key in ("p50", "p95", "p99"))]
                for name, arm in arms.items()
                for stage, values in _timed(arm)
            ],
        ),
        Tabular(
            "Acceptance by domain",
            ["arm", "domain", "requests", "α", "95 % interval", "mean length"],
            [
                [name, domain, str(figures["num_tested_requests"]), *_acceptance_cells(figures)]
                for name, arm in arms.items()
                for domain, figures in arm["domains"].items()
                if figures["num_tested_requests"]
            ],
        ),
    ]
    if report.get("paired"):
        found.append(_paired(report["paired"]))
    return found


def _paired(paired: Mapping[str, Any]) -> Tabular:
    return Tabular(
        "Speed-up over plain decoding, same questions",
        ["arm", "pairs", "decode", "end to end", "same text"],
        [
            [
                name,
                str(found["num_pairs"]),
                *(_factor(found[key]) for key in ("decode_speed_up", "end_to_end_speed_up")),
                NONE_MARK if found["same_text"] is None else f"{found['same_text']:.0%}",
            ]
            for name, found in paired.items()
        ],
    )


def _sections(report: Mapping[str, Any]) -> Iterator[Section]:
    tables = load_tabulars(report)
    good = ", ".join(f"{name} {arm['num_good']}" for name, arm in report["arms"].items())
    stands_on = f"Requests answered whole: {good}."
    if report.get("paired"):
        rows = [
            (f"{name}: {key.replace('_', ' ')}", found[f"{key}_speed_up"]["value"],
             found[f"{key}_speed_up"]["interval"])
            for name, found in report["paired"].items() for key in ("decode", "end_to_end")
        ]  # fmt: skip
        yield Section(
            tables[3].title, stands_on, plots.rates_with_intervals(rows, "times plain decoding"), tables[3]
        )
    yield Section("Arms", stands_on, table=tables[0])
    rows_of_latency = [
        (f"{name}: {stage}", values) for name, arm in report["arms"].items() for stage, values in _timed(arm)
    ]
    yield Section("Latency", stands_on, plots.percentiles_by_row(rows_of_latency, "seconds"), tables[1])
    rates = [
        (f"{name}: {domain} ({figures['num_tested_requests']})", figures["acceptance_rate"], figures["interval"])
        for name, arm in report["arms"].items() for domain, figures in arm["domains"].items()
        if figures["num_tested_requests"]
    ]  # fmt: skip
    if rates:
        yield Section(
            tables[2].title, "Requests with tested draft tokens in brackets.",
            plots.rates_with_intervals(rates, "α, 95 % interval"), tables[2],
        )  # fmt: skip


def _timed(arm: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "end to end", arm["latency_seconds"]
    yield "first token", arm["time_to_first_token_seconds"]
    yield from arm["stage_seconds"].items()


def _bounded(values: Mapping[str, Any], key: str) -> str:
    if values[key] is None:
        return NONE_MARK
    interval = values[f"{key}_interval"]
    return number(values[key]) + (f" ({interval[0]:.3f}–{interval[1]:.3f})" if interval else "")


def _factor(found: Mapping[str, Any]) -> str:
    if found["value"] is None:
        return NONE_MARK
    interval = found["interval"]
    return number(found["value"], 2) + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")


def _acceptance_cells(figures: Mapping[str, Any]) -> list[str]:
    interval = figures["interval"]
    return [
        number(figures["acceptance_rate"]) + (" lossy" if figures["lossy"] else ""),
        NONE_MARK if interval is None else f"{interval[0]:.3f}–{interval[1]:.3f}",
        number(figures["mean_acceptance_length"], 2),
    ]


def _errors(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in sorted(errors.items())) or "0"
