"""The report's figures, by hand for a few requests and against the truth for many."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from generation.types import DrafterCounts
from rag_service import report_rendering as rendering
from rag_service.acceptance_report import acceptance_report
from rag_service.record import RequestRecord
from rag_service.report_query import ReportQuery, ReportQueryError
from rag_service.request_log import RequestLog
from tests.rag_service.records import NOON, record_of, simulated, stats_of

DOMAINS = ("finance", "legal", "other")


def report_of(
    records: list[RequestRecord], baselines: dict[str, float] | None = None, **values: Any
) -> dict[str, Any]:
    log = RequestLog(None, max_pending=100_000)
    for record in records:
        log.append(record)
    query = ReportQuery.of({"since": NOON - 10, "until": NOON + 100_000, **values}, NOON, DOMAINS)
    with log.reading(query.since, query.until) as connection:
        return acceptance_report(connection, query, DOMAINS, baselines)


def test_figures_by_hand() -> None:
    """Request a: rounds 4, 1, 0 of 4 and one empty; request b: 2 of 4."""
    records = [
        record_of("a", stats_of([4, 1, 0], num_empty=1, overlap=0.6), total_seconds=1.0),
        record_of("b", stats_of([2], overlap=0.9), total_seconds=3.0),
    ]
    found = report_of(records, baselines={"finance": 0.8})["domains"]["finance"]
    assert found["acceptance_rate"] == pytest.approx(7 / (7 + 3))
    assert found["estimator"] == "accepted_over_tested"
    assert found["mean_of_requests_acceptance_rate"] == pytest.approx((5 / 7 + 2 / 3) / 2)
    assert found["accepted_over_drafted"] == pytest.approx(7 / 16)
    assert found["mean_acceptance_length"] == pytest.approx(1 + 7 / 5)
    assert found["overlap"] == pytest.approx((0.6 * 7 + 0.9 * 3) / 10)
    assert found["conditional_acceptance"] == pytest.approx([3 / 4, 2 / 3, 1 / 2, 1.0])
    assert found["acceptance_histogram"] == [1, 1, 1, 0, 1]
    assert found["rounds_by_cause"] == {"rejected": 3, "all_accepted": 1, "no_proposal_miss": 1}
    assert (found["num_requests"], found["num_tested_requests"], found["num_rounds"]) == (2, 2, 5)
    assert found["latency_seconds"]["p50"] == pytest.approx(2.0)
    assert found["stage_seconds"]["decode"] == pytest.approx({"p50": 1.0, "p95": 1.0, "p99": 1.0})
    assert found["tokens_per_second"] == pytest.approx(80 / 2.0)
    assert found["baseline"] == 0.8
    low, high = found["interval"]
    assert low <= 0.7 <= high


def test_nothing_is_none_and_never_zero() -> None:
    assert report_of([])["domains"]["all"]["acceptance_rate"] is None
    found = report_of([record_of("a", None, outcome="error"), record_of("b", stats_of([], num_empty=3))])
    finance = found["domains"]["finance"]
    for name in ("acceptance_rate", "interval", "accepted_over_drafted", "overlap", "lookahead_hit_rate"):
        assert finance[name] is None, name
    assert finance["num_tested_requests"] == 0
    assert finance["mean_acceptance_length"] == 1.0
    assert finance["outcomes"] == {"error": 1, "ok": 1}
    # The failed request's time is no latency of the service.
    assert finance["num_timed_requests"] == 1
    json.dumps(found, allow_nan=False)


def test_block_verification_shows_the_overlap_and_says_so() -> None:
    records = [record_of(name, stats_of([4, 0], method="block", overlap=0.62)) for name in "abc"]
    found = report_of(records)["domains"]["all"]
    assert found["acceptance_rate"] == pytest.approx(0.62)
    assert found["estimator"] == "overlap"
    mixed = report_of([*records, record_of("d", stats_of([4, 4], overlap=0.9))])["domains"]["all"]
    assert mixed["estimator"] == "overlap"
    assert mixed["acceptance_rate"] == pytest.approx((3 * 5 * 0.62 + 8 * 0.9) / 23)


def test_lossy_requests_give_no_acceptance_rate() -> None:
    lossy = [record_of(name, stats_of([4, 4, 3], method="typical")) for name in "ab"]
    found = report_of(lossy)["domains"]["finance"]
    assert found["acceptance_rate"] is None
    assert found["interval"] is None
    assert found["lossy"] is True
    assert found["lossy_acceptance_rate"] == pytest.approx(11 / 12)
    mixed = report_of([*lossy, record_of("c", stats_of([1]))])["domains"]["finance"]
    assert mixed["acceptance_rate"] == pytest.approx(1 / 2)
    assert mixed["accepted_over_drafted"] == pytest.approx(1 / 4)
    assert mixed["lossy"] is False
    assert mixed["num_lossy_requests"] == 2
    assert "lossy" in rendering.markdown_of(report_of([*lossy, record_of("c", stats_of([1]))]))


def test_domains_are_told_apart_and_unknown_ones_pooled() -> None:
    records = [
        record_of("a", stats_of([4, 0])),
        record_of("b", stats_of([0]), domain="legal"),
        record_of("c", stats_of([1]), domain="made-up"),
        record_of("d", stats_of([1]), domain="another"),
    ]
    found = report_of(records)["domains"]
    assert list(found) == ["all", "finance", "legal", "other"]
    assert found["other"]["num_requests"] == 2
    assert found["legal"]["acceptance_rate"] == 0.0
    assert found["all"]["acceptance_rate"] == pytest.approx(6 / 10)
    assert list(report_of(records, domain="legal")["domains"]) == ["legal"]


def test_groups_by_draft_and_temperature() -> None:
    records = [
        record_of("a", stats_of([4, 4]), draft="d1", temperature=0.0),
        record_of("b", stats_of([0, 0]), draft="d2", temperature=0.0),
        record_of("c", stats_of([2, 2]), draft="d2", temperature=0.7),
        record_of("e", stats_of([2]), draft="d2", temperature=1.5),
    ]
    groups = report_of(records, group_by="domain,draft")["domains"]["finance"]["groups"]
    assert {group["draft"]: group["acceptance_rate"] for group in groups} == {
        "d1": 1.0, "d2": pytest.approx(6 / 11),
    }  # fmt: skip
    groups = report_of(records, group_by=["draft", "temperature"])["domains"]["all"]["groups"]
    assert {(group["draft"], group["temperature"]) for group in groups} == {
        ("d1", "0"), ("d2", "0"), ("d2", "0.5-1"), ("d2", ">1"),
    }  # fmt: skip


def test_drafter_kinds_are_credited_with_what_they_earned() -> None:
    both = stats_of([4, 1], kind="model")
    counts = {"model": DrafterCounts(5, 4, 0, 3.0, 4), "passages": DrafterCounts(3, 1, 1, 1.0, 2)}
    object.__setattr__(both, "by_drafter", counts)
    found = report_of([record_of("a", both), record_of("b", stats_of([2], kind="passages"))])
    drafters = found["domains"]["finance"]["drafters"]
    assert drafters["model"]["acceptance_rate"] == 1.0
    assert drafters["passages"]["acceptance_rate"] == pytest.approx(3 / 5)
    assert drafters["passages"]["num_requests"] == 2
    groups = report_of([record_of("a", both)], group_by="drafter")["domains"]["all"]["groups"]
    assert {group["drafter"]: group["num_draft_tokens"] for group in groups} == {"model": 5, "passages": 3}


def test_interval_and_rate_hold_the_truth() -> None:
    records = simulated(np.random.default_rng(4), 400, 0.8)
    found = report_of(records)["domains"]["finance"]
    low, high = found["interval"]
    assert low < 0.8 < high
    assert high - low < 0.06
    assert found == report_of(records)["domains"]["finance"]


def test_series() -> None:
    rng = np.random.default_rng(5)
    records = simulated(rng, 60, 0.9) + simulated(rng, 60, 0.5, start=NOON + 7200)
    series = report_of(records, bucket="1h")["series"]
    assert series["bucket_seconds"] == 3600
    buckets = series["domains"]["finance"]
    assert sum(bucket["num_requests"] for bucket in buckets) == 120
    assert all(bucket["start"] % 3600 == 0 for bucket in buckets)
    assert buckets[0]["acceptance_rate"] > 0.8
    assert buckets[-1]["acceptance_rate"] < 0.65
    rows = rendering.series_rows(report_of(records, bucket="1h"))
    assert rows[0]["interval_low"] <= rows[0]["acceptance_rate"] <= rows[0]["interval_high"]


def test_renderings_agree() -> None:
    records = [
        *simulated(np.random.default_rng(6), 30, 0.7),
        record_of("x", None, domain="legal", draft="d|2"),
    ]
    report = report_of(records, group_by="draft")
    rows = list(csv.DictReader(io.StringIO(rendering.csv_of(report))))
    assert [(row["domain"], row["draft"]) for row in rows][:2] == [("all", "all"), ("all", "d1")]
    assert float(rows[0]["acceptance_rate"]) == report["domains"]["all"]["acceptance_rate"]
    assert rows[-1]["acceptance_rate"] == ""
    table = pq.read_table(io.BytesIO(rendering.parquet_of(report)))
    assert table.column("num_requests").to_pylist() == [int(row["num_requests"]) for row in rows]
    markdown = rendering.markdown_of(report)
    assert "d\\|2" in markdown
    assert "No requests" in rendering.markdown_of(report_of([]))
    console = Console(width=200, file=io.StringIO())
    for shown in rendering.tables_of(report):
        console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{report['domains']['finance']['acceptance_rate']:.3f}" in text
    assert "prefill" in text


def test_drift_is_in_the_report_and_in_every_reading_of_it() -> None:
    rng = np.random.default_rng(5)
    records = [*simulated(rng, 120, 0.85), *simulated(rng, 60, 0.5, start=NOON + 7200, draft="d2")]
    report = report_of(records, {"finance": 0.85})
    drift = report["domains"]["finance"]["drift"]
    assert drift["direction"] == "fell"
    assert drift["begun_at"] == pytest.approx(NOON + 7200, abs=1200)
    assert [change["dimension"] for change in drift["changed"]] == ["draft"]
    assert report["domains"]["all"]["drift"] is None
    assert "finance: the acceptance rate fell from 0.850 (baseline)" in rendering.markdown_of(report)
    assert "What changed: draft was d1" in str(rendering.tables_of(report)[0].caption)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": "seven days"}, "window is a number with a unit"),
        ({"window": "0d"}, "window is a number with a unit"),
        ({"group_by": "tenant"}, "group_by knows domain"),
        ({"domain": "cooking"}, "There is no domain cooking; there are finance, legal, other"),
        ({"colour": "red"}, "There is no parameter colour"),
        ({"since": "yesterday"}, "since is a time in Unix seconds"),
        ({"since": NOON, "until": NOON - 1}, "ends before it begins"),
        ({"window": "7d", "bucket": "1s"}, "more than 400 buckets"),
    ],
)
def test_bad_queries_are_refused_in_a_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportQueryError, match=message):
        ReportQuery.of(values, NOON, DOMAINS)


def test_queries() -> None:
    query = ReportQuery.of({"window": "36h", "group_by": "domain, draft,draft", "bucket": "auto"}, NOON)
    assert (query.since, query.until) == (NOON - 36 * 3600, NOON)
    assert query.group_by == ("draft",)
    assert query.bucket_seconds == 3600
