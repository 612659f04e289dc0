"""The Recorder replica in this process, on the real recorder and request log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.recorder import RecorderReplica
from deployments.refusal import Refusal
from generation.types import SpeculationStats
from rag_service.config import Settings
from rag_service.record import RequestRecord
from rag_service.target_load import target_load


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[RecorderReplica]:
    recorder = RecorderReplica(Settings(data_folder=tmp_path))
    yield recorder
    recorder.__del__()


def record(number: int) -> RequestRecord:
    stats = SpeculationStats(
        num_rounds=4,
        num_draft_tokens=8,
        num_accepted_tokens=6,
        num_rejections=2,
        rounds_by_cause={"all_accepted": 2, "rejected": 2},
        acceptance_method="token",
    )
    return RequestRecord(f"r{number}", time.time(), "legal", "default", "ok", 0.5, stats=stats)


async def test_counts_once_reports_and_exposes(replica: RecorderReplica) -> None:
    records = [record(number) for number in range(4)]
    await replica.record_many(records)
    await replica.record_many(records)
    load = target_load({"waiting": 3, "kv": {"slots": 8, "free_slots": 2}})
    metrics = await replica.metrics({"draft-1": True, "draft-2": False}, load)
    assert 'rag_requests_total{domain="legal",outcome="ok"} 4.0' in metrics
    assert 'rag_draft_breaker_open{replica="draft-1"} 1.0' in metrics
    assert 'rag_draft_breaker_open{replica="draft-2"} 0.0' in metrics
    assert "rag_target_waiting_requests 3.0" in metrics
    assert "rag_kv_slots_used 6.0" in metrics
    assert "rag_kv_slots_used 6.0" not in await replica.metrics(None)
    report = await replica.acceptance({"window": "1h"})
    assert not isinstance(report, Refusal)
    legal = report["domains"]["legal"]
    assert legal["num_requests"] == 4
    assert legal["acceptance_rate"] == pytest.approx(0.75)
    assert await replica.ready() == {}
    replica.check_health()


async def test_a_senseless_report_is_refused_by_parameter(replica: RecorderReplica) -> None:
    refusal = await replica.acceptance({"window": "yesterday-ish"})
    assert isinstance(refusal, Refusal)
    assert refusal.param == "window"
