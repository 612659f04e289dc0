"""The recorder as its deployment uses it: many threads in, metrics and reports out, across restarts."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_service.baseline import BaselineError, baselines_of, read_baselines
from rag_service.config import Settings
from rag_service.gate_record import GateRecord, model_fingerprint, record_from, write_record
from rag_service.recorder import Recorder
from rag_service.report_query import ReportQueryError
from rag_service.request_log import RequestLog
from tests.rag_service.records import record_of, simulated, stats_of


def settings_of(folder: Path, **telemetry: Any) -> Settings:
    values = {"flush_seconds": 0.05, **telemetry}
    return Settings.parse({"data_folder": str(folder), "telemetry": values})


def test_records_are_counted_logged_and_survive_a_restart(tmp_path: Path) -> None:
    recorder = Recorder(settings_of(tmp_path))
    records = simulated(np.random.default_rng(1), 50, 0.7, start=time.time() - 3600)
    for record in records:
        recorder.record(record)
    recorder.flush()
    metrics = recorder.metrics()
    assert 'rag_requests_total{domain="finance",outcome="ok"} 50.0' in metrics
    assert 'rag_acceptance_rate{domain="finance"}' in metrics
    assert 'rag_build_info{draft="d1",target="smol"' in metrics
    before = recorder.acceptance({"window": "1d"})
    recorder.close()
    again = Recorder(settings_of(tmp_path))
    after = again.acceptance({"window": "1d"})
    again.close()
    assert before["domains"]["finance"]["num_requests"] == 50
    assert after["domains"] == before["domains"]


def test_a_record_delivered_twice_counts_once(tmp_path: Path) -> None:
    recorder = Recorder(settings_of(tmp_path))
    record = record_of("a", stats_of([3]), started_at=time.time())
    recorder.record(record)
    recorder.record(record)
    recorder.record(record_of("a", stats_of([3]), started_at=time.time() + 0.001))
    assert recorder.acceptance({"until": time.time() + 10})["domains"]["all"]["num_requests"] == 2
    assert 'outcome="ok"} 2.0' in recorder.metrics()
    recorder.close()


def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    recorder = Recorder(settings_of(tmp_path))

    def work(name: int) -> None:
        for record in simulated(np.random.default_rng(name), 40, 0.8, start=time.time() - 3600 + name):
            recorder.record(record)
            if name == 0:
                recorder.metrics()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.acceptance({})["domains"]["all"]["num_requests"] == 240
    assert 'outcome="ok"} 240.0' in recorder.metrics()
    recorder.close()
    assert not list((tmp_path / "requests" / "write-ahead").iterdir())


@pytest.mark.parametrize("telemetry", [{"flush_seconds": 0.05}, {"flush_seconds": 1e6, "flush_rows": 2}])
def test_the_log_is_flushed_without_being_asked(tmp_path: Path, telemetry: dict[str, Any]) -> None:
    recorder = Recorder(settings_of(tmp_path, **telemetry))
    recorder.record(record_of("a", started_at=time.time()))
    recorder.record(record_of("b", started_at=time.time()))
    for _ in range(200):
        if not recorder._log._current or not recorder._log._current._unsynced:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the row was never forced to the disk")
    recorder.close()


def test_log_that_cannot_be_written_is_an_alert_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "requests").write_text("a file where the folder should be")
    recorder = Recorder(settings_of(tmp_path))
    recorder.record(record_of("a", stats_of([3]), started_at=time.time()))
    metrics = recorder.metrics()
    assert "rag_request_log_failing 1.0" in metrics
    assert "rag_request_log_pending 1.0" in metrics
    assert "rag_request_log_dropped_total 0.0" in metrics
    assert recorder.acceptance({})["domains"]["finance"]["num_requests"] == 1
    assert recorder.ready() == {}
    recorder.close()


def test_bad_query_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(settings_of(tmp_path))
    with pytest.raises(ReportQueryError, match="There is no domain cooking"):
        recorder.acceptance({"domain": "cooking"})
    recorder.close()


def test_baselines_reach_metrics_and_report(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    path.write_text(json.dumps({"domains": {"finance": {"acceptance_rate": 0.81}, "legal": {}}}))
    recorder = Recorder(settings_of(tmp_path, baseline_file=str(path)))
    recorder.record(record_of("a", stats_of([3]), started_at=time.time()))
    recorder.set_breakers({"draft-1": True})
    metrics = recorder.metrics()
    assert 'rag_acceptance_rate_baseline{domain="finance"} 0.81' in metrics
    assert 'rag_acceptance_rate_baseline{domain="legal"}' not in metrics
    assert 'rag_draft_breaker_open{replica="draft-1"} 1.0' in metrics
    assert recorder.acceptance({})["domains"]["finance"]["baseline"] == 0.81
    recorder.close()


@pytest.mark.parametrize("content", ["{", "[1]", '{"domains": {"finance": 1.5}}'])
def test_bad_baselines_are_named_and_do_not_stop_the_recorder(tmp_path: Path, content: str) -> None:
    path = tmp_path / "gate.json"
    path.write_text(content)
    with pytest.raises(BaselineError, match=r"The baseline .*gate\.json"):
        read_baselines(path)
    Recorder(settings_of(tmp_path, baseline_file=str(path))).close()


def test_retention_and_text_follow_the_settings(tmp_path: Path) -> None:
    recorder = Recorder(settings_of(tmp_path, retention_days=3, keep_text=True))
    recorder.record(record_of("old", started_at=time.time() - 10 * 86_400))
    recorder.record(record_of("new", started_at=time.time(), question="Who?", answer="Me."))
    recorder.close()
    with RequestLog(str(tmp_path / "requests")).reading() as connection:
        rows = connection.execute("select request_id, question, answer from requests").fetchall()
    assert rows == [("new", "Who?", "Me.")]


def _gated(folder: Path, drafters: str = "served") -> Settings:
    """A pair of two files with a gate record in the service's own folder: as served .8, the model alone .6."""
    for name in ("target", "draft"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(name.encode())
    values = {
        "data_folder": str(folder / "data"),
        "engine": {"target": {"model": str(folder / "target")}},
        "draft": {"draft": {"model": str(folder / "draft")}},
    }
    settings = Settings.parse(values)
    assert settings.draft.draft is not None
    figures = {
        name: {"pooled": {}, "domains": {"finance": {"acceptance_rate": rate, "num_requests": 40}}}
        for name, rate in (("served", 0.8), ("model", 0.6))
    }
    prints = model_fingerprint(settings.engine.target), model_fingerprint(settings.draft.draft)
    record = GateRecord(
        "target", prints[0], "draft", prints[1], "data", "2026-12-01T00:00:00+00:00", "tests", True, 0.5, (),
        0.8, drafters, 0.0, figures,
    )  # fmt: skip
    write_record(record, folder / "data" / "gates")
    return settings


def test_the_gate_records_rates_are_what_drift_is_judged_against(tmp_path: Path) -> None:
    """From the gate to the alarm, with no file copied: .8 was gated, .6 is served, and that is a fall."""
    recorder = Recorder(_gated(tmp_path))
    assert 'rag_acceptance_rate_baseline{domain="finance"} 0.8' in recorder.metrics()
    for record in simulated(np.random.default_rng(1), 150, 0.6, start=time.time() - 7200):
        recorder.record(record)
    recorder.flush()
    drift = recorder.acceptance({"window": "1d"})["domains"]["finance"]["drift"]
    recorder.close()
    assert (drift["direction"], drift["reference"], drift["rate_before"]) == ("fell", "baseline", 0.8)


def test_a_draft_that_failed_its_gate_and_is_off_gives_no_baseline(tmp_path: Path) -> None:
    settings = _gated(tmp_path)
    path = next((tmp_path / "data" / "gates").glob("gate-*.json"))
    record = record_from(json.loads(path.read_text(encoding="utf-8")))
    write_record(replace(record, passed=False), path.parent)
    assert baselines_of(settings) == {}
    forced = settings.draft.model_copy(update={"force": "yes"})
    assert baselines_of(settings.model_copy(update={"draft": forced})) == {"finance": 0.8}


def test_the_record_of_another_pair_is_no_baseline(tmp_path: Path) -> None:
    settings = _gated(tmp_path)
    assert baselines_of(settings) == {"finance": 0.8}
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"trained on")
    assert baselines_of(settings) == {}


def test_a_named_gate_record_is_read_as_served_and_goes_before_the_services_own(tmp_path: Path) -> None:
    settings = _gated(tmp_path, "model")
    record = next((tmp_path / "data" / "gates").glob("gate-*.json"))
    assert read_baselines(record) == {"finance": 0.8}
    other = tmp_path / "evaluation.json"
    other.write_text('{"domains": {"legal": {"acceptance_rate": 0.5}}}', encoding="utf-8")
    telemetry = settings.telemetry.model_copy(update={"baseline_file": other})
    assert baselines_of(settings.model_copy(update={"telemetry": telemetry})) == {"legal": 0.5}
