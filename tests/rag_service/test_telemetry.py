"""Metrics: the names and labels that dashboards and alerts rely on, and a bounded number of series."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from generation.types import ROUND_CAUSES, DrafterCounts, SpeculationStats
from rag_service import telemetry
from rag_service.record import RequestRecord
from rag_service.target_load import TargetLoad
from rag_service.telemetry import Telemetry
from retrieval.types import JobCounts

DOMAINS = ("finance", "medical", "legal", "software", "general")
LOAD_GAUGES = (
    "rag_target_replicas", "rag_target_running_requests", "rag_target_waiting_requests",
    "rag_target_waiting_tokens", "rag_kv_slots", "rag_kv_slots_used", "rag_kv_use_max_ratio", "rag_draft_replicas",
)  # fmt: skip
LABELS = {
    "rag_requests": {"domain", "outcome"},
    "rag_request_seconds": {"domain"},
    "rag_stage_seconds": {"domain", "stage"},
    "rag_time_to_first_token_seconds": {"domain"},
    "rag_generated_tokens": {"domain"},
    "rag_spec_rounds": {"domain", "cause"},
    "rag_spec_draft_tokens": {"domain", "drafter"},
    "rag_spec_accepted_tokens": {"domain", "drafter"},
    "rag_spec_rejections": {"domain", "drafter"},
    "rag_spec_tested_per_position": {"domain", "position"},
    "rag_spec_accepted_per_position": {"domain", "position"},
    "rag_spec_lookahead": {"result"},
    "rag_acceptance_rate": {"domain"},
    "rag_acceptance_rate_baseline": {"domain"},
    "rag_acceptance_drift": {"domain"},
    "rag_draft_breaker_open": {"replica"},
    **{name: set[str]() for name in LOAD_GAUGES},
    "rag_build_info": {"version", "target", "draft"},
    "rag_request_log_pending": set(),
    "rag_request_log_failing": set(),
    "rag_request_log_dropped": set(),
    "rag_ingestion_jobs": {"state"},
    "rag_ingestion_failed_documents": set(),
    "rag_ingestion_jobs_waiting": set(),
}
ORDER = ("domain", "outcome", "stage", "cause", "drafter", "position", "result", "replica", "state",
         "version", "target", "draft", "le")  # fmt: skip
STATS = SpeculationStats(
    num_rounds=6, num_draft_tokens=14, num_accepted_tokens=8, num_rejections=2, tested_per_position=(5, 4),
    accepted_per_position=(4, 3), rounds_by_cause={"rejected": 2, "all_accepted": 3, "no_proposal_miss": 1},
    overlap_sum=7.0, num_overlap=10, lookahead_hits=4, lookahead_misses=1,
    by_drafter={"model": DrafterCounts(8, 5, 1, 4, 6), "passages": DrafterCounts(6, 3, 1, 3, 4)},
)  # fmt: skip


def record(
    domain: str = "finance", stats: SpeculationStats | None = STATS, **changes: object
) -> RequestRecord:
    base = RequestRecord(
        request_id="r", started_at=time.time() - 1, domain=domain, tenant="t", outcome="ok",
        total_seconds=1.0, stage_seconds={"queue": 0.1, "decode": 0.7}, time_to_first_token_seconds=0.2,
        num_generated_tokens=40, stats=stats,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def samples(metrics: Telemetry) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.exposition()):
        for sample in family.samples:
            labels = [sample.labels[name] for name in ORDER if name in sample.labels]
            found[(sample.name, *labels)] = sample.value
    return found


def fill(metrics: Telemetry, domains: tuple[str, ...]) -> None:
    counts = DrafterCounts(3, 2, 1, 2.0, 3)
    stats = replace(
        STATS,
        tested_per_position=(1,) * 40,
        accepted_per_position=(1,) * 40,
        rounds_by_cause=dict.fromkeys((*ROUND_CAUSES, "strange"), 1),
        by_drafter=dict.fromkeys((*telemetry.DRAFTERS, "strange"), counts),
    )
    stages = dict.fromkeys((*telemetry.STAGES, "strange"), 0.1)
    for domain in domains:
        for outcome in (*telemetry.OUTCOMES, "strange"):
            metrics.observe(record(domain, stats, outcome=outcome, stage_seconds=stages))
    metrics.set_baselines(dict.fromkeys(domains, 0.8))
    metrics.set_drift(dict.fromkeys(domains, False))
    metrics.set_breakers({f"replica-{number}": False for number in range(200)})
    metrics.set_load(TargetLoad(2, 1, 1, 9, 8, 4, 0.5, 1))
    metrics.set_jobs(JobCounts(1, 2, 3, 4))
    metrics.set_build("0.1.0", "smol", "d1")


def test_names_and_labels_are_those_documented() -> None:
    metrics = Telemetry(DOMAINS)
    fill(metrics, DOMAINS)
    families = {family.name: family for family in text_string_to_metric_families(metrics.exposition())}
    assert set(families) == set(LABELS)
    for name, labels in LABELS.items():
        for sample in families[name].samples:
            assert set(sample.labels) - {"le"} == labels, sample.name


def test_series_are_bounded_whatever_clients_send() -> None:
    metrics = Telemetry(DOMAINS)
    fill(metrics, DOMAINS)
    fill(metrics, tuple(f"made-up-{number}" for number in range(300)))
    domains = len(DOMAINS) + 1
    histogram = len(telemetry.LATENCY_BUCKETS) + 3  # buckets, +Inf, sum, count
    stage = len(telemetry.STAGE_BUCKETS) + 3
    expected = domains * (
        (len(telemetry.OUTCOMES) + 1)
        + 2 * histogram
        + (len(telemetry.STAGES) + 1) * stage
        + 1  # generated tokens
        + (len(ROUND_CAUSES) + 1)
        + 3 * (len(telemetry.DRAFTERS) + 1)
        + 2 * telemetry.MAX_POSITIONS
        + 2  # running rate and drift
    ) + (
        2  # look-ahead
        + telemetry.MAX_REPLICAS
        + 1  # build
        + len(LOAD_GAUGES)
        + 3  # request log
        + 4  # ingestion
    )
    # Baselines exist for configured domains alone, and the second fill named none of them.
    assert len(samples(metrics)) == expected
    assert expected < 1500
    assert not any("made-up" in label for key in samples(metrics) for label in key)


def test_jobs_are_shown_while_they_are_known() -> None:
    metrics = Telemetry(DOMAINS)
    assert not any("ingestion" in key[0] for key in samples(metrics))
    metrics.set_jobs(JobCounts(num_waiting=1, num_succeeded=2, num_failed=3, num_failed_documents=4))
    found = samples(metrics)
    assert found["rag_ingestion_jobs_total", "succeeded"] == 2
    assert found["rag_ingestion_jobs_total", "failed"] == 3
    assert found["rag_ingestion_failed_documents_total",] == 4
    assert found["rag_ingestion_jobs_waiting",] == 1
    metrics.set_jobs(None)
    assert not any("ingestion" in key[0] for key in samples(metrics))


def test_counts_of_one_request() -> None:
    metrics = Telemetry(DOMAINS)
    metrics.observe(record())
    metrics.observe(record(outcome="error", stats=None))
    found = samples(metrics)
    assert found["rag_requests_total", "finance", "ok"] == 1
    assert found["rag_requests_total", "finance", "error"] == 1
    assert found["rag_request_seconds_count", "finance"] == 1
    assert found["rag_stage_seconds_sum", "finance", "decode"] == pytest.approx(0.7)
    assert found["rag_spec_accepted_tokens_total", "finance", "passages"] == 3
    assert found["rag_spec_rejections_total", "finance", "model"] == 1
    assert found["rag_spec_rounds_total", "finance", "no_proposal_miss"] == 1
    assert found["rag_spec_tested_per_position_total", "finance", "1"] == 5
    assert found["rag_spec_accepted_per_position_total", "finance", "2"] == 3
    assert found["rag_spec_lookahead_total", "hit"] == 4
    assert found["rag_acceptance_rate", "finance"] == pytest.approx(8 / 10)


def test_running_rate_is_absent_until_something_was_tested() -> None:
    metrics = Telemetry(DOMAINS)
    metrics.observe(record("legal", stats=None))
    metrics.observe(record("legal", SpeculationStats(num_rounds=4, rounds_by_cause={"no_proposal_off": 4})))
    metrics.observe(record("medical", replace(STATS, acceptance_method="typical")))
    metrics.observe(record("general", started_at=time.time() - 2 * telemetry.WINDOW_SECONDS))
    assert not [key for key in samples(metrics) if key[0] == "rag_acceptance_rate"]


def test_running_rate_is_pooled_over_the_recent_requests() -> None:
    metrics = Telemetry(DOMAINS)
    for _ in range(telemetry.WINDOW_REQUESTS):
        metrics.observe(record(stats=replace(STATS, num_accepted_tokens=0, num_rejections=10)))
    for _ in range(telemetry.WINDOW_REQUESTS // 2):
        metrics.observe(record(stats=replace(STATS, num_accepted_tokens=30, num_rejections=10)))
    # The window holds 250 requests of 0/10 and 250 of 30/40.
    assert samples(metrics)["rag_acceptance_rate", "finance"] == pytest.approx(30 / 50)


def test_running_rate_under_block_verification_is_the_overlap() -> None:
    metrics = Telemetry(DOMAINS)
    metrics.observe(record(stats=replace(STATS, acceptance_method="block")))
    assert samples(metrics)["rag_acceptance_rate", "finance"] == pytest.approx(0.7)


def test_series_of_gone_replicas_and_old_builds_go() -> None:
    metrics = Telemetry(DOMAINS)
    metrics.set_breakers({"a": True, "b": False})
    metrics.set_breakers({"b": True})
    metrics.set_build("0.1.0", "smol", "d1")
    metrics.set_build("0.1.0", "smol", "d2")
    found = samples(metrics)
    assert {key: value for key, value in found.items() if key[0] == "rag_draft_breaker_open"} == {
        ("rag_draft_breaker_open", "b"): 1.0
    }
    assert [key[1:] for key in found if key[0] == "rag_build_info"] == [("0.1.0", "smol", "d2")]
