"""``ask``, ``status``, ``config`` and ``serve`` in front of a service that says what the test wants.

The service here is a few lines of http.server, since these tests are about what the commands make of replies;
the real service behind them is in tests/deployments and in ``test_serve_shows_an_answer_and_stops`` below.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rag_service.cli.corpus import domain_files
from rag_service.cli.output import CommandError
from rag_service.models import PACKAGED, default_cache, state
from tests.rag_service.cli.test_output import run

ROOT = Path(__file__).resolve().parents[3]
FIGURES = {
    "speculative_decoding": {
        "acceptance_rate": 0.75,
        "num_rounds": 4,
        "num_draft_tokens": 12,
        "num_accepted_draft_tokens": 6,
        "mean_acceptance_length": 2.5,
        "drafter": "passages",
    },
    "timings": {"prefill_seconds": 0.25, "decode_seconds": 0.5},
}
SOURCES = [{"index": 1, "title": "Opening hours", "document_id": "hours.md"}]
EVENTS = [
    {"choices": [], "sources": SOURCES},
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "It opens "}}]},
    {"choices": [{"index": 0, "delta": {"content": "at nine. [1]"}}]},
    {"choices": [], "metrics": FIGURES},
]


class Service(ThreadingHTTPServer):
    """Replies by path; ``asked`` keeps the bodies of questions."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.replies: dict[str, tuple[int, Any]] = {
            "/v1/models": (200, {"data": [{"id": "tiny"}]}),
            "/readyz": (200, {"status": "ready", "not_ready": {}}),
            "/v1/acceptance": (200, {"domains": {"finance": {"acceptance_rate": 0.5, "num_requests": 3}}}),
        }
        self.stream: list[Any] = [*EVENTS, "[DONE]"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        status, body = self.server.replies.get(self.path, (404, {"error": {"message": "Not here."}}))
        self._send(status, "application/json", body if isinstance(body, str) else json.dumps(body))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers.get("authorization"))
        if self.path in self.server.replies:
            status, reply = self.server.replies[self.path]
            self._send(status, "application/json", json.dumps(reply))
            return
        lines = [item if isinstance(item, str) else json.dumps(item) for item in self.server.stream]
        self._send(200, "text/event-stream", "".join(f"data: {line}\n\n" for line in lines))

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_ask_prints_answer_sources_timings_and_acceptance(service: Service) -> None:
    done = run("ask", "When?", "--domain", "general", "--url", service.url, "--api-key", "secret")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It opens at nine. [1]\n")
    assert "[1] Opening hours (hours.md)" in done.stdout
    assert "prefill 0.250 s, decode 0.500 s" in done.stdout
    assert (
        "α 0.75, 6 of 12 draft tokens accepted, 2.50 tokens a round, 4 rounds, drafter passages"
        in done.stdout
    )
    asked = service.asked[0]
    assert asked["model"] == "tiny"
    assert asked["messages"] == [{"role": "user", "content": "When?"}]
    assert asked["rag"] == {"domain": "general"}
    assert asked["stream"] is True
    assert "temperature" not in asked
    assert service.keys == ["Bearer secret"]


def test_ask_with_json_prints_the_reply_alone(service: Service) -> None:
    reply = {"choices": [{"message": {"content": "Nine."}}], "sources": SOURCES, "metrics": FIGURES}
    service.replies["/v1/chat/completions"] = (200, reply)
    done = run("ask", "When?", "--url", service.url, "--temperature", "0.5", "--json")
    assert json.loads(done.stdout) == reply
    assert service.asked[0]["temperature"] == 0.5
    assert "rag" not in service.asked[0]


def test_an_acceptance_rate_that_nothing_was_tested_for_is_none(service: Service) -> None:
    service.stream[-2] = {"metrics": {"speculative_decoding": {"acceptance_rate": None}, "timings": {}}}
    assert "Acceptance: α none" in run("ask", "When?", "--url", service.url).stdout


def test_refusals_of_the_service_are_repeated(service: Service) -> None:
    error = {"error": {"message": "There is no domain x; there are a, b.", "code": "unknown_domain"}}
    service.replies["/v1/chat/completions"] = (400, error)
    done = run("ask", "When?", "--domain", "x", "--url", service.url, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == error
    assert done.stderr == "Error: There is no domain x; there are a, b.\n"


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        ([EVENTS[1], {"error": {"message": "The deadline has passed."}}], "The deadline has passed."),
        ([EVENTS[1]], "broke off"),
        (["no json"], "is not rag-service"),
    ],
)
def test_a_stream_that_ends_badly_is_an_error(service: Service, stream: list[Any], said: str) -> None:
    service.stream = stream
    done = run("ask", "When?", "--url", service.url)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_ask_where_nothing_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = run("ask", "When?", "--url", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert done.returncode == 1
    assert "start one with 'rag-service serve'" in done.stderr


def test_empty_question_is_a_usage_error() -> None:
    assert run("ask", "  ").returncode == 2


def test_status_of_a_ready_service(service: Service) -> None:
    done = run("status", "--url", service.url, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ready"] is True
    assert json.loads(done.stdout)["domains"]["finance"]["num_requests"] == 3
    assert "finance: 3 requests, α 0.50, P95 none" in run("status", "--url", service.url).stdout


def test_status_names_what_is_not_ready(service: Service) -> None:
    service.replies["/readyz"] = (503, {"status": "not_ready", "not_ready": {"target": "loading"}})
    done = run("status", "--url", service.url)
    assert done.returncode == 1
    assert "not ready" in done.stdout
    assert "target: loading" in done.stdout


STATUS = {
    "gateway": {"num_in_flight": 3},
    "generator": {
        "replica": "rag#Target#abc",
        "target": "smol",
        "draft": "d1",
        "running": 4,
        "waiting": 2,
        "queued_tokens": 700,
        "kv": {"slots": 8, "free_slots": 3},
        "lookahead": {"hits": 3, "misses": 1, "alpha": 0.625},
        "link": {"replicas": 1, "breakers": {"draft[a]": "open", "draft[b]": "closed"}},
    },
}


def test_status_is_a_table_of_queue_kv_breakers_models_and_alpha(service: Service) -> None:
    service.replies["/v1/status"] = (200, STATUS)
    done = run("status", "--url", service.url, environment={"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("abc"))
    assert row == ["abc", "smol", "d1", "1", "4", "2", "(700", "tokens)", "5/8", "0.62", "75%"]
    assert "3 requests in flight" in done.stdout
    assert "breaker of draft[a]: open" in done.stdout
    assert "draft[b]" not in done.stdout
    result = json.loads(run("status", "--url", service.url, "--json").stdout)
    assert result["targets"] == [STATUS["generator"]]


def test_status_has_a_row_for_each_target(service: Service) -> None:
    first = STATUS["generator"]
    assert isinstance(first, dict)
    second = {**first, "replica": "rag#Target#xyz", "link": None, "lookahead": {}}
    several = {**first, "replicas": [first, second]}
    service.replies["/v1/status"] = (200, {"gateway": {}, "generator": several})
    shown = run("status", "--url", service.url, environment={"COLUMNS": "120"}).stdout
    row = next(line.split() for line in shown.splitlines() if line.startswith("xyz"))
    assert row == ["xyz", "smol", "d1", "-", "4", "2", "(700", "tokens)", "5/8", "-", "-"]


def test_status_without_the_right_key_shows_what_may_be_seen(service: Service) -> None:
    for path in ("/v1/status", "/v1/acceptance"):
        service.replies[path] = (403, {"error": {"message": "Not for this key."}})
    done = run("status", "--url", service.url)
    assert (done.returncode, done.stdout) == (0, f"{service.url}: ready\n")


def test_watching_goes_on_while_the_service_is_away(service: Service) -> None:
    from rich.console import Console

    from rag_service.cli.client import Client
    from rag_service.cli.status import _shown

    with Client(service.url) as here, Client("http://127.0.0.1:1") as gone:
        console = Console(width=120)
        with console.capture() as shown:
            console.print(_shown(here, with_ray=False), _shown(gone, with_ray=False))
    assert "finance: 3 requests" in shown.get()
    assert "No service answers at http://127.0.0.1:1" in shown.get()


def test_one_object_and_watching_exclude_each_other(service: Service) -> None:
    done = run("status", "--watch", "--json", "--url", service.url)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "usage"


def test_scale_where_no_ray_runs_is_one_sentence() -> None:
    done = run("scale", "Draft", "0", "--ray", "127.0.0.1:1", environment={"RAY_AUTH_TOKEN": "0" * 64})
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No Ray answers at 127.0.0.1:1" in done.stderr


def test_config_show_is_yaml_and_json_with_secrets_masked(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("retrieval: {index: {url: 'http://qdrant:6333', api_key: hush}}")
    shown = run("config", "show", "--config", str(settings))
    as_json = run("config", "show", "--config", str(settings), "--json")
    assert yaml.safe_load(shown.stdout) == json.loads(as_json.stdout)
    assert "hush" not in shown.stdout + as_json.stdout


def test_config_build_writes_what_serve_takes(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    assert run("config", "build", "--output", str(path), "--host", "0.0.0.0").returncode == 0
    document = yaml.safe_load(path.read_text())
    assert document["http_options"]["host"] == "0.0.0.0"
    assert document["applications"][0]["import_path"] == "deployments.app:build_app"
    assert [item.name for item in tmp_path.iterdir()] == ["serve.yaml"]


def test_unknown_setting_is_a_usage_error_with_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("service: {prot: 1}")
    for command in (["config", "show"], ["config", "build"], ["serve"]):
        done = run(*command, "--config", str(path))
        assert done.returncode == 2, command
        assert "service.prot" in done.stderr
        assert "port" in done.stderr


def test_serve_without_models_says_how_to_get_them(tmp_path: Path) -> None:
    done = run("serve", environment={"RAG_SERVICE_CACHE": str(tmp_path)})
    assert done.returncode == 1
    assert "run 'rag-service models fetch'" in done.stderr
    assert "Traceback" not in done.stderr


def needs_models() -> None:
    missing = [name for name, model in PACKAGED.items() if state(model, default_cache()) != "ready"]
    if missing:
        pytest.skip(f"not in the model cache: {', '.join(missing)}")


def test_serve_on_a_taken_port_says_so() -> None:
    needs_models()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port))
    assert done.returncode == 1
    assert f"Port {port} on 127.0.0.1 is taken" in done.stderr
    assert "Traceback" not in done.stderr


def test_corpus_is_a_folder_of_domains(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no corpus folder"):
        domain_files(tmp_path / "nowhere")
    (tmp_path / "legal").mkdir()
    with pytest.raises(CommandError, match="no subfolder with documents"):
        domain_files(tmp_path)
    (tmp_path / "legal" / "terms.md").write_text("# Terms")
    (tmp_path / "legal" / "picture.png").write_bytes(b"")
    (tmp_path / "README.md").write_text("not a document")
    assert domain_files(tmp_path) == {"legal": [tmp_path / "legal" / "terms.md"]}


@pytest.mark.slow
def test_serve_shows_an_answer_and_stops(tmp_path: Path) -> None:
    """The real service, as ``make serve`` starts it: index the corpus, ask, print, stop."""
    needs_models()
    environment = {"RAG_SERVICE_DATA": str(tmp_path / "data")}
    corpus = str(ROOT / "examples" / "corpus")
    command = ("serve", "--port", "0", "--corpus", corpus, "--demo", "--once", "--json")
    first = run(*command, environment=environment)
    assert first.returncode == 0, first.stderr
    shown = json.loads(first.stdout)
    assert shown["corpus"]["num_documents"] >= 48
    assert shown["corpus"]["num_unchanged"] == 0
    assert "thirst" in shown["answer"]["text"]
    assert shown["answer"]["sources"][0]["domain"] == "medical"
    assert shown["answer"]["metrics"]["speculative_decoding"]["num_rounds"] > 0
    assert "Traceback" not in first.stderr

    again = run(*command, environment=environment)
    assert again.returncode == 0, again.stderr
    corpus_again = json.loads(again.stdout)["corpus"]
    assert corpus_again["num_unchanged"] == corpus_again["num_documents"]
