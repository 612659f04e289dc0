"""The acceptance report: what ``GET /v1/acceptance``, the dashboard and ``alpha report`` show.

``domains`` maps each domain that had requests, and ``all``, to its figures (``acceptance_figures``). With a
grouping, each has ``groups``: the same figures by draft, target, drafter kind, temperature bucket or mode.
``drafters`` splits the acceptance by the kind of drafter that earned it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt

from rag_service.acceptance_figures import acceptance_of, figures_of
from rag_service.drift import detect_drift
from rag_service.report_query import ReportQuery
from rag_service.request_columns import RequestColumns, load_columns

Report = dict[str, Any]
ALL: Final = "all"
SERIES_RESAMPLES: Final = 400
MAX_GROUPS: Final = 50
"""Groups shown by domain, largest first; so many drafts or modes are a mistake rather than a comparison."""


def acceptance_report(
    connection: duckdb.DuckDBPyConnection,
    query: ReportQuery,
    domains: Collection[str] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> Report:
    """Report on the connection's ``requests``, which hold the rows of the query's window.

    ``domains``: the configured ones, any other is counted as ``other``; None takes the log's word.
    """
    columns = load_columns(connection, domains)
    by_drafter = load_columns(connection, domains, by_drafter=True)
    report: Report = {
        "since": query.since,
        "until": query.until,
        "window": f"{_iso(query.since)}/{_iso(query.until)}",
        "group_by": ["domain", *query.group_by],
        "domains": {},
    }
    for domain, part in _by_domain(columns, query.domain):
        figures = figures_of(part)
        of_drafters = _of_domain(by_drafter, domain)
        figures["baseline"] = (baselines or {}).get(domain)
        figures["drift"] = detect_drift(part, figures["baseline"]) if domain != ALL else None
        figures["drafters"] = dict(_drafters(of_drafters))
        if query.group_by:
            source = of_drafters if "drafter" in query.group_by else part
            figures["groups"] = list(_groups(source, query.group_by))
        report["domains"][domain] = figures
    if query.bucket_seconds is not None:
        report["series"] = {
            "bucket_seconds": query.bucket_seconds,
            "domains": {
                domain: list(_buckets(part, query)) for domain, part in _by_domain(columns, query.domain)
            },
        }
    return report


def _by_domain(columns: RequestColumns, only: str | None) -> Iterator[tuple[str, RequestColumns]]:
    if only is None:
        yield ALL, columns
    for domain in sorted(set(columns.names["domain"])):
        if only in (None, domain):
            yield domain, _of_domain(columns, domain)


def _of_domain(columns: RequestColumns, domain: str) -> RequestColumns:
    return columns if domain == ALL else columns.where(columns.names["domain"] == domain)


def _drafters(columns: RequestColumns) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in sorted(set(columns.names["drafter"])):
        part = columns.where(columns.names["drafter"] == kind)
        yield kind, acceptance_of(part) | {"num_requests": len(part)}


def _groups(columns: RequestColumns, group_by: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    keys = np.array(list(zip(*(columns.names[name] for name in group_by), strict=True)), dtype=object)
    found: dict[tuple[str, ...], int] = {}
    for key in map(tuple, keys):
        found[key] = found.get(key, 0) + 1
    for key in sorted(found, key=lambda key: -found[key])[:MAX_GROUPS]:
        kept: npt.NDArray[np.bool_] = np.all(keys == np.array(key, dtype=object), axis=1)
        part = columns.where(kept)
        figures = figures_of(part)
        if "drafter" in group_by:
            figures = acceptance_of(part) | {"num_requests": len(part)}
        yield {**dict(zip(group_by, key, strict=True)), **figures}


def _buckets(columns: RequestColumns, query: ReportQuery) -> Iterator[dict[str, Any]]:
    """Buckets aligned to whole multiples of their width; empty ones are left out."""
    width = query.bucket_seconds or (query.until - query.since)
    numbers = np.floor(columns.started_at / width)
    kept_names = (
        "acceptance_rate", "interval", "estimator", "lossy", "num_requests", "num_tested_requests",
        "mean_acceptance_length", "accepted_over_drafted", "tokens_per_second", "num_generated_tokens",
        "latency_seconds", "time_to_first_token_seconds", "lookahead_hit_rate",
    )  # fmt: skip
    for number in np.unique(numbers):
        figures = figures_of(columns.where(numbers == number), num_resamples=SERIES_RESAMPLES)
        yield {"start": float(number * width), **{name: figures[name] for name in kept_names}}


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%dT%H:%MZ")
