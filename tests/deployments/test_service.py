"""The whole service on real Ray with the real models, asked by the stock ``openai`` client.

The draft is the target's own model: it agrees nearly always, so speculation is surely at work, and no
distilled draft is needed. What is tested does not depend on how good a draft is.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve

from deployments.app import RunningService, run
from rag_service.config import Settings, cache_folder
from tests.deployments.span_collector import SpanCollector

MODEL = "smollm2-135m-instruct"
QUESTION = "Why did the revenue of Corvane rise?"
DOCUMENT = {
    "id": "corvane",
    "domain": "finance",
    "title": "Corvane annual report",
    "text": (
        "The revenue of Corvane rose by twelve percent to 840 million because the pump division sold more "
        "pumps to water utilities in the north. Costs rose by five percent because steel became dearer. "
        "The board proposes a dividend of two euros per share, payable in June."
    ),
}
SETTINGS: dict[str, Any] = {
    "service.port": 0,
    "draft.draft": {"model": MODEL},
    "draft.force": "yes",
    "engine.speculation.mode": "synchronous",
    "engine.speculation.passages": False,
    "engine.speculation.num_draft_tokens": 3,
    # On a busy machine a draft as large as the target is late; here it is tried what drafting does, not when.
    "engine.speculation.deadline_multiple": 40.0,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((cache_folder() / "models" / name).exists() for name in (MODEL, "all-minilm-l6-v2")),
        reason="the packaged models are not in the cache (rag-service models fetch)",
    ),
]


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    found = SpanCollector()
    yield found
    found.close()


@pytest.fixture(scope="module")
def service(
    local_ray: None, collector: SpanCollector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("data")
    traced = {"telemetry.trace": True, "telemetry.trace_endpoint": collector.endpoint}
    settings = Settings.load(None, {**SETTINGS, **traced, "data_folder": str(folder)})
    with run(settings, ready_seconds=400) as running:
        yield running


@pytest.fixture(scope="module")
def http(service: RunningService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=120, trust_env=False) as client:
        job = client.post("/v1/documents", json={"documents": [DOCUMENT]}).json()
        wait(lambda: client.get(f"/v1/jobs/{job['id']}").json()["state"] == "succeeded")
        yield client


@pytest.fixture(scope="module")
def client(service: RunningService, http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def wait(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, "it did not happen"
        time.sleep(0.1)


def asked(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 48,
        "extra_body": {"rag": {"domain": "finance"}},
        **fields,
    }


def replica(deployment: str) -> dict[str, Any]:
    status: dict[str, Any] = (
        serve.get_deployment_handle(deployment, "rag").status.remote().result(timeout_s=60)
    )
    return status


def logged(deployment: str) -> list[dict[str, Any]]:
    """Lines of a deployment's replicas, as Serve's JSON files have them.

    Other tests' applications in this Ray session log in plain text, each in a file of its own: those are left out.
    """
    node: Any = ray._private.worker._global_node
    files = Path(node.get_session_dir_path()).glob(f"logs/serve/replica_rag_{deployment}_*.log")
    texts = [file.read_text() for file in files]
    return [json.loads(line) for text in texts if text.startswith("{") for line in text.splitlines()]


def streamed(
    client: openai.OpenAI, after: int = 0, action: Callable[[], None] | None = None
) -> tuple[str, Any]:
    """The text of a streamed answer and its last chunk's extras; ``action`` is done after so many pieces."""
    pieces: list[str] = []
    extras: dict[str, Any] = {}
    for chunk in client.chat.completions.create(
        **asked(), stream=True, stream_options={"include_usage": True}
    ):
        extras |= chunk.model_extra or {}
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.append(choice.delta.content)
                if len(pieces) == after and action is not None:
                    action()
    return "".join(pieces), extras


def test_the_openai_client_gets_a_cited_answer_with_figures(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asked())
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    extras = answer.model_extra or {}
    assert extras["sources"][0]["document_id"] == "corvane"
    figures = extras["metrics"]["speculative_decoding"]
    assert figures["num_draft_tokens"] > 0
    assert figures["acceptance_rate"] > 0.5
    assert extras["metrics"]["timings"]["total_seconds"] > 0


def test_a_stream_has_its_sources_first_and_the_same_text(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**asked()).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked(), stream=True))
    assert chunks[0].choices == []
    assert (chunks[0].model_extra or {})["sources"][0]["document_id"] == "corvane"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == plain


def test_one_trace_leads_through_every_deployment(client: openai.OpenAI, collector: SpanCollector) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01", "x-request-id": "traced-1"}
    answer = client.chat.completions.with_raw_response.create(**asked(), extra_headers=headers)
    assert answer.headers["traceparent"].split("-")[1] == trace_id
    assert answer.headers["traceparent"].split("-")[2] != "00f067aa0ba902b7"
    wait(
        lambda: {"rounds", "POST /v1/chat/completions"} <= {s.name for s in collector.of_trace(trace_id)}, 60
    )
    wait(lambda: {"embed", "score passages"} <= {s.name for s in collector.of_trace(trace_id)}, 60)
    spans = {span.name: span for span in collector.of_trace(trace_id)}
    names = {span.span_id: span.name for span in spans.values()}
    assert {name: names.get(span.parent_id) for name, span in spans.items()} == {
        "POST /v1/chat/completions": None,
        "search": "POST /v1/chat/completions",
        "retriever": "search",
        "embed": "retriever",
        "index": "retriever",
        "rerank": "POST /v1/chat/completions",
        "score passages": "rerank",
        "generate": "POST /v1/chat/completions",
        "target": "generate",
        "queue": "target",
        "prefill": "target",
        "rounds": "target",
    }
    assert spans["POST /v1/chat/completions"].parent_id == "00f067aa0ba902b7"
    assert spans["POST /v1/chat/completions"].attributes["rag.request_id"] == "traced-1"
    assert {spans[name].deployment for name in ("search", "embed", "score passages", "prefill")} == {
        "Gateway", "Retriever", "Reranker", "Target",
    }  # fmt: skip
    rounds = spans["rounds"]
    assert rounds.num_events >= 2
    assert 0 < rounds.attributes["rag.num_accepted_tokens"] <= rounds.attributes["rag.num_draft_tokens"]
    assert spans["queue"].start_ns <= spans["prefill"].start_ns < rounds.start_ns < rounds.end_ns


def test_killing_the_draft_in_mid_answer_changes_nothing_but_speed(client: openai.OpenAI) -> None:
    before, _ = streamed(client)
    pid = replica("Draft")["pid"]
    after, extras = streamed(client, after=3, action=lambda: os.kill(pid, signal.SIGKILL))
    assert after == before
    causes = extras["metrics"]["speculative_decoding"]["rounds_by_cause"]
    assert any(cause.startswith("no_proposal") for cause in causes), causes

    def drafts_again() -> bool:
        figures = (client.chat.completions.create(**asked()).model_extra or {})["metrics"]
        return bool(figures["speculative_decoding"]["num_draft_tokens"])

    wait(drafts_again)
    assert replica("Draft")["pid"] != pid


def test_a_client_that_leaves_frees_target_and_draft(client: openai.OpenAI, http: httpx.Client) -> None:
    def gauge(name: str) -> float:
        found = re.search(rf"^{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found.group(1))

    with client.chat.completions.create(**asked(max_tokens=2000), stream=True) as stream:
        for number, _ in enumerate(stream):
            if number == 3:
                break
        wait(lambda: gauge("rag_target_running_requests") == 1, 30)
    left = time.monotonic()
    wait(lambda: gauge("rag_target_running_requests") == 0 and gauge("rag_kv_slots_used") == 0, 30)
    print(f"free in the metrics after {time.monotonic() - left:.2f} s")
    wait(lambda: replica("Draft")["sequences"] == 0, 30)


def test_silent_connections_and_readers_that_never_read_hold_nobody_up(
    service: RunningService, client: openai.OpenAI
) -> None:
    alone = client.chat.completions.create(**asked()).choices[0].message.content
    host, port = service.url.removeprefix("http://").split(":")
    body = json.dumps({**asked(max_tokens=400, stream=True, ignore_eos=True), "extra_body": None})
    question = body.replace(', "extra_body": null', "").encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        for _ in range(2):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect((host, int(port)))
            reader.sendall(f"{head}Content-Length: {len(question)}\r\n\r\n".encode() + question)
        wait(lambda: replica("Target")["running"] == 2, 30)
        assert client.chat.completions.create(**asked()).choices[0].message.content == alone
        wait(lambda: replica("Target")["running"] == 0, 60)
    assert client.chat.completions.create(**asked()).choices[0].message.content == alone


def test_several_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    def text(_: int) -> str | None:
        content: str | None = client.chat.completions.create(**asked()).choices[0].message.content
        return content

    alone = text(0)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(4))) == [alone] * 4


def test_alpha_and_p95_are_in_the_metrics_and_the_report(client: openai.OpenAI, http: httpx.Client) -> None:
    client.chat.completions.create(**asked())

    def finance() -> dict[str, Any]:
        report = http.get("/v1/acceptance", params={"domain": "finance"}).json()
        figures: dict[str, Any] = report["domains"]["finance"]
        return figures

    wait(lambda: finance()["num_requests"] >= 2, 30)
    figures = finance()
    assert 0.5 < figures["acceptance_rate"] <= 1.0
    assert figures["latency_seconds"]["p95"] > 0
    metrics = http.get("/metrics").text
    alpha = re.search(r'^rag_acceptance_rate\{domain="finance"\} (\S+)$', metrics, re.MULTILINE)
    assert alpha is not None
    assert 0.5 < float(alpha.group(1)) <= 1.0
    assert 'rag_request_seconds_bucket{domain="finance",le="' in metrics
    assert 'rag_spec_accepted_tokens_total{domain="finance",drafter="model"}' in metrics
    assert re.search(r"^rag_draft_breaker_open\{replica=", metrics, re.MULTILINE)


def test_a_failed_ingestion_is_in_the_metrics(http: httpx.Client) -> None:
    def failed() -> tuple[float, float]:
        text = http.get("/metrics").text
        jobs = re.search(r'^rag_ingestion_jobs_total\{state="failed"\} (\S+)$', text, re.MULTILINE)
        documents = re.search(r"^rag_ingestion_failed_documents_total (\S+)$", text, re.MULTILINE)
        return float(jobs.group(1)) if jobs else -1.0, float(documents.group(1)) if documents else -1.0

    wait(lambda: failed() == (0.0, 0.0), 30)
    broken = {"files": ("broken.pdf", b"%PDF-1.4 and then nothing")}
    job = http.post("/v1/documents", files=broken, data={"domain": "finance"}).json()
    wait(lambda: http.get(f"/v1/jobs/{job['id']}").json()["state"] == "failed", 60)
    wait(lambda: failed() == (1.0, 1.0), 30)


def test_status_watches_until_it_is_interrupted(service: RunningService) -> None:
    """On a terminal of its own, as a person sees it."""
    screen, terminal = pty.openpty()
    command = "from rag_service.cli import main; main()"
    arguments = [sys.executable, "-c", command, "status", "--url", service.url, "--watch", "--every", "0.2"]
    watching = subprocess.Popen(arguments, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    times: set[bytes] = set()
    ends_at = time.monotonic() + 120
    while len(times) < 2:
        assert time.monotonic() < ends_at, shown
        shown += os.read(screen, 65536)
        times = set(re.findall(rb"\d\d:\d\d:\d\d", shown))
    watching.send_signal(signal.SIGINT)
    assert watching.wait(timeout=60) == 0
    os.close(screen)
    assert b"ready" in shown
    assert b"requests in flight" in shown
    assert b"Traceback" not in shown


def test_what_a_replica_warns_of_is_in_serves_json_log(service: RunningService) -> None:
    warned = [line for line in logged("Target") if line["filename"] == "target.py"]
    assert any("no gate record" in line["message"] for line in warned), warned
    assert all(line["deployment"] == "rag_Target" for line in warned)


def test_an_unstarted_request_outlives_its_target(client: openai.OpenAI) -> None:
    before = client.chat.completions.create(**asked()).choices[0].message.content
    os.kill(replica("Target")["pid"], signal.SIGKILL)
    assert client.chat.completions.create(**asked()).choices[0].message.content == before


def test_a_stream_cut_by_its_targets_death_ends_with_a_typed_error(client: openai.OpenAI) -> None:
    pid = replica("Target")["pid"]
    with pytest.raises(openai.APIError) as lost:
        streamed(client, after=2, action=lambda: os.kill(pid, signal.SIGKILL))
    assert lost.value.code == "replica_lost"
    wait(lambda: bool(client.models.list().data), 10)
    assert client.chat.completions.create(**asked()).choices[0].message.content


@pytest.mark.parametrize("name", ["Reranker", "Retriever"])
def test_searches_outlive_a_killed_replica(http: httpx.Client, name: str) -> None:
    body = {"query": QUESTION, "domain": "finance"}
    first = http.post("/v1/search", json=body).json()["data"]
    assert first
    os.kill(replica(name)["pid"], signal.SIGKILL)
    assert http.post("/v1/search", json=body).json()["data"] == first


def test_answers_outlive_a_killed_recorder_and_their_records_too(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    def num_requests() -> int:
        return int(
            http.get("/v1/acceptance", params={"domain": "finance"}).json()["domains"]["finance"][
                "num_requests"
            ]
        )

    client.chat.completions.create(**asked())
    before = num_requests()
    os.kill(replica("Recorder")["pid"], signal.SIGKILL)
    client.chat.completions.create(**asked())
    wait(lambda: num_requests() == before + 1)


def test_a_killed_proxy_and_controller_come_back(client: openai.OpenAI) -> None:
    before = client.chat.completions.create(**asked()).choices[0].message.content
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].startswith(("SERVE_PROXY_ACTOR", "SERVE_CONTROLLER_ACTOR")):
            ray.kill(ray.get_actor(named["name"], namespace=named["namespace"]), no_restart=False)

    def answers() -> bool:
        try:
            return bool(client.chat.completions.create(**asked()).choices[0].message.content == before)
        except openai.APIConnectionError:
            return False

    wait(answers)
