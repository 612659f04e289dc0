"""``rag-service alpha report`` over a real log and over a real HTTP server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
from typer.testing import CliRunner

from rag_service.cli import app
from rag_service.config import Settings
from rag_service.recorder import Recorder
from tests.rag_service.records import record_of, simulated, stats_of

runner = CliRunner()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAG_SERVICE_DATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "220")
    recorder = Recorder(Settings.load())
    for record in simulated(np.random.default_rng(1), 40, 0.8, start=time.time() - 3600):
        recorder.record(record)
    recorder.record(record_of("x", stats_of([0, 1]), domain="legal", draft="d2", started_at=time.time()))
    recorder.close()
    return tmp_path / "requests"


@pytest.fixture
def service(log: Path) -> Iterator[str]:
    recorder = Recorder(Settings.load())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("authorization") == "Bearer secret"
            query = dict(parse_qsl(urlsplit(self.path).query))
            body = recorder.acceptance(query) if allowed else {"error": {"message": "No key was given."}}
            content = json.dumps(body).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
    recorder.close()


def test_table_names_every_domain_with_its_figures(log: Path) -> None:
    done = runner.invoke(app, ["alpha", "report", "--since", "1d", "--by", "domain,draft"])
    assert done.exit_code == 0, done.output
    for expected in (
        "finance",
        "legal",
        "d2",
        "95 % interval",
        "mean length",
        "prefill",
        "first token",
        "P99",
    ):
        # A heading may be folded over lines on a narrow terminal; a word never is.
        assert all(word in done.output for word in expected.split())
    legal = next(line for line in done.output.splitlines() if "legal" in line and "d2" in line)
    assert "0.333" in legal


def test_json_is_one_object_with_the_documented_keys(log: Path) -> None:
    done = runner.invoke(app, ["alpha", "report", "--json"])
    found = json.loads(done.stdout)["domains"]["finance"]
    assert found["num_requests"] == 40
    assert 0.7 < found["acceptance_rate"] < 0.9
    assert set(found["latency_seconds"]) == {"p50", "p95", "p99"}
    assert found["interval"][0] < found["acceptance_rate"] < found["interval"][1]
    assert found["accepted_over_drafted"] < found["acceptance_rate"]
    assert found["mean_acceptance_length"] > 1


@pytest.mark.parametrize("name", ["csv", "md", "html", "json", "parquet"])
def test_every_format_goes_to_a_file(log: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / f"report.{name}"
    done = runner.invoke(app, ["alpha", "report", "--format", name, "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert b"finance" in path.read_bytes()


def test_another_log_folder_and_an_empty_one(log: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["alpha", "report", "--log", str(log), "--json"])
    assert json.loads(done.stdout)["domains"]["all"]["num_requests"] == 41
    done = runner.invoke(app, ["alpha", "report", "--log", str(tmp_path / "nothing"), "--json"])
    assert json.loads(done.stdout)["domains"]["all"]["acceptance_rate"] is None
    done = runner.invoke(app, ["alpha", "report", "--log", str(tmp_path / "nothing")])
    assert done.exit_code == 0
    assert not (tmp_path / "nothing").exists()


def test_running_service_is_asked(service: str) -> None:
    arguments = ["alpha", "report", "--url", service, "--by", "domain,draft", "--json"]
    done = runner.invoke(app, [*arguments, "--api-key", "secret"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["domains"]["legal"]["groups"][0]["draft"] == "d2"
    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    assert "No key was given." in done.output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--since", "soon"], 2, "window is a number with a unit"),
        (["--by", "colour"], 2, "group_by knows"),
        (["--domain", "cooking"], 2, "There is no domain cooking"),
        (["--url", "http://127.0.0.1:9", "--json"], 1, "No service answers"),
        (["--url", "http://127.0.0.1:9", "--log", "x"], 2, "not both"),
        (["--format", "parquet"], 2, "name a file"),
    ],
)
def test_errors_are_one_sentence(log: Path, arguments: list[str], status: int, message: str) -> None:
    done = runner.invoke(app, ["alpha", "report", *arguments])
    assert done.exit_code == status
    assert message in done.output
    assert "Traceback" not in done.output
