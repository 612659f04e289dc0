"""The acceptance report for people and other programs: table, Markdown, CSV, Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table
from rich.text import Text

from rag_service.report_query import GROUPINGS
from rag_service.telemetry import STAGES

Row = dict[str, Any]
NONE_MARK = "–"
_TEXT_COLUMNS = ("arm", "stage", *GROUPINGS)


@dataclass(frozen=True, slots=True)
class Tabular:
    """A table of text."""

    title: str
    header: list[str]
    rows: list[list[str]]


def flat_rows(report: Mapping[str, Any]) -> list[Row]:
    """One row a domain, or a domain's group: plain columns, None where nothing was measured."""
    return [_flat(domain, keys, figures) for domain, keys, figures in _entries(report)]


def csv_of(report: Mapping[str, Any]) -> str:
    """RFC 4180 text with a header line; an unknown figure is an empty field."""
    rows = flat_rows(report)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]) if rows else ["domain"], lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def parquet_of(report: Mapping[str, Any]) -> bytes:
    """The rows of ``flat_rows`` as a Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(flat_rows(report)), buffer)
    return buffer.getvalue()


def series_rows(report: Mapping[str, Any]) -> list[Row]:
    """The time series as flat rows: domain, start (Unix seconds) and the bucket's figures."""
    rows = []
    for domain, buckets in report.get("series", {}).get("domains", {}).items():
        for bucket in buckets:
            low, high = bucket["interval"] or (None, None)
            row = {"domain": domain, **{k: v for k, v in bucket.items() if not isinstance(v, (dict, list))}}
            row |= {"interval_low": low, "interval_high": high}
            row |= _percentile_columns("latency", bucket["latency_seconds"])
            rows.append({name: value for name, value in row.items() if name != "interval"})
    return rows


def tabulars_of(report: Mapping[str, Any]) -> tuple[Tabular, Tabular]:
    """The report as two tables of text: acceptance by domain and group, latency by domain and stage."""
    return (
        Tabular(f"Acceptance, {report['window']}", _acceptance_header(report), _acceptance_cells(report)),
        Tabular("Latency in seconds", ["domain", "stage", "P50", "P95", "P99"], _latency_cells(report)),
    )


def markdown_of(report: Mapping[str, Any]) -> str:
    """Two pipe tables, acceptance and latency, with the window before them."""
    lines = [f"# Acceptance report, {report['window']}", ""]
    if not any(figures["num_requests"] for figures in report["domains"].values()):
        return "\n".join([*lines, "No requests in this window.", ""])
    for table in tabulars_of(report):
        lines += [f"## {table.title.split(',')[0]}", "", _pipes(table.header)]
        lines += [_pipes(["---"] * len(table.header)), *(_pipes(row) for row in table.rows), ""]
    return "\n".join([*lines, *footnotes_of(report), *drift_sentences(report), ""])


def tables_of(report: Mapping[str, Any]) -> list[Table]:
    """Two rich tables for a terminal: acceptance and latency."""
    tables = [rich_of(found) for found in tabulars_of(report)]
    notes = [*footnotes_of(report), *drift_sentences(report)]
    tables[0].caption = Text("\n".join(notes)) if notes else None
    return tables


def rich_of(found: Tabular) -> Table:
    """A table for a terminal; rows that begin alike are kept together. Markup in cells shows as text."""
    table = Table(title=Text(found.title), title_justify="left")
    for name in found.header:
        # On a narrow terminal names fold, and headings of figures; a figure cut short would be a wrong one.
        if name in _TEXT_COLUMNS:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    several = len({row[0] for row in found.rows}) < len(found.rows)
    for row, following in zip_longest(found.rows, found.rows[1:]):
        ends = several and following is not None and following[0] != row[0]
        table.add_row(*(Text(cell) for cell in row), end_section=ends)
    return table


def number(value: float | None, digits: int = 3) -> str:
    """A figure for reading; an unknown one is a dash."""
    return NONE_MARK if value is None else f"{value:.{digits}f}"


def _entries(report: Mapping[str, Any]) -> Iterator[tuple[str, Row, Row]]:
    group_by = [name for name in report["group_by"] if name != "domain"]
    for domain, figures in report["domains"].items():
        yield domain, dict.fromkeys(group_by, "all") if group_by else {}, figures
        for group in figures.get("groups", []):
            yield domain, {name: group[name] for name in group_by}, group


def _flat(domain: str, keys: Row, figures: Row) -> Row:
    low, high = figures["interval"] or (None, None)
    row = {
        "domain": domain,
        **keys,
        "num_requests": figures["num_requests"],
        "num_tested_requests": figures["num_tested_requests"],
        "acceptance_rate": figures["acceptance_rate"],
        "interval_low": low,
        "interval_high": high,
        "estimator": figures["estimator"],
        "lossy": figures["lossy"],
        "lossy_acceptance_rate": figures["lossy_acceptance_rate"],
        "mean_of_requests_acceptance_rate": figures["mean_of_requests_acceptance_rate"],
        "overlap": figures["overlap"],
        "accepted_over_drafted": figures["accepted_over_drafted"],
        "mean_acceptance_length": figures.get("mean_acceptance_length"),
        "num_rounds": figures.get("num_rounds"),
        "num_draft_tokens": figures["num_draft_tokens"],
        "num_accepted_draft_tokens": figures["num_accepted_draft_tokens"],
        "tokens_per_second": figures.get("tokens_per_second"),
        **_percentile_columns("latency", figures.get("latency_seconds")),
        **_percentile_columns("time_to_first_token", figures.get("time_to_first_token_seconds")),
    }
    for stage in STAGES:
        row |= _percentile_columns(stage, figures.get("stage_seconds", {}).get(stage))
    return row


def _percentile_columns(name: str, values: Row | None) -> Row:
    return {f"{name}_{key}_seconds": (values or {}).get(key) for key in ("p50", "p95", "p99")}


def _acceptance_header(report: Mapping[str, Any]) -> list[str]:
    return [
        *report["group_by"], "requests", "α", "95 % interval", "accepted / drafted", "mean length", "tokens/s",
    ]  # fmt: skip


def _acceptance_cells(report: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            domain,
            *(str(value) or NONE_MARK for value in keys.values()),
            str(figures["num_requests"]),
            _rate_cell(figures),
            _interval_cell(figures["interval"]),
            number(figures["accepted_over_drafted"]),
            number(figures.get("mean_acceptance_length"), 2),
            number(figures.get("tokens_per_second"), 1),
        ]
        for domain, keys, figures in _entries(report)
    ]


def _rate_cell(figures: Row) -> str:
    if figures["lossy"]:
        return f"{number(figures['lossy_acceptance_rate'])} lossy"
    return number(figures["acceptance_rate"]) + (" β" if figures["estimator"] == "overlap" else "")


def _interval_cell(interval: list[float] | None) -> str:
    return NONE_MARK if interval is None else f"{interval[0]:.3f}–{interval[1]:.3f}"


def _latency_cells(report: Mapping[str, Any]) -> list[list[str]]:
    return [
        [domain, name, *(number(values[key], 2) for key in ("p50", "p95", "p99"))]
        for domain, figures in report["domains"].items()
        for name, values in (
            ("end to end", figures["latency_seconds"]),
            ("first token", figures["time_to_first_token_seconds"]),
            *figures["stage_seconds"].items(),
        )
        if values["p50"] is not None
    ]


def footnotes_of(report: Mapping[str, Any]) -> list[str]:
    """What a reader must know of the figures shown."""
    figures = [figures for _, _, figures in _entries(report)]
    notes = []
    if any(found["estimator"] == "overlap" for found in figures):
        notes.append("β: mean overlap of draft and target, the estimator of α under block verification.")
    if any(found["lossy"] or found.get("num_lossy_requests") for found in figures):
        notes.append("lossy: some requests were verified by a lossy rule, whose acceptance is no α.")
    return notes


def drift_sentences(report: Mapping[str, Any]) -> list[str]:
    """One sentence for each domain whose acceptance rate has drifted."""
    return [
        f"{domain}: {drift_sentence(figures['drift'])}"
        for domain, figures in report["domains"].items()
        if figures.get("drift")
    ]


def drift_sentence(drift: Mapping[str, Any]) -> str:
    """What drifted, since when, and what changed with it."""
    begun = "before this window" if drift["begun_before_window"] else date_of(drift["begun_at"])
    changed = "; ".join(
        f"{change['dimension']} was {_shares(change['before'])} and is {_shares(change['after'])}"
        for change in drift["changed"]
    )
    return (
        f"the acceptance rate {drift['direction']} from {drift['rate_before']:.3f} ({drift['reference']})"
        f" to {drift['rate_after']:.3f}; it began {begun}."
        f" {'What changed: ' + changed if changed else 'Nothing else that is recorded changed'}."
    )


def date_of(at: float) -> str:
    """A time as people read it."""
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{value or NONE_MARK} {share:.0%}" for value, share in shares.items() if share > 0)


def _pipes(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
