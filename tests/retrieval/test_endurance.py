"""Long or violent runs of ingestion, in child processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from retrieval.service import RetrievalService
from retrieval.types import SearchRequest
from tests.retrieval.endurance import CONFIG, tiny_documents

MAX_GROWTH_BYTES = 96 * 2**20


def child(folder: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.retrieval.endurance", str(folder), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.slow
def test_a_killed_ingestion_goes_on_where_it_was(cache_folder: Path, tmp_path: Path) -> None:
    with child(tmp_path, 100_000) as process:
        assert process.stdout is not None
        process.stdout.readline()  # a thousand documents were read
        process.send_signal(signal.SIGKILL)
    service = RetrievalService(CONFIG, cache_folder, tmp_path)
    written = service.index.count()
    assert 0 < written < 5000
    done = service.ingestion.run(tiny_documents(1000))
    assert done.num_unchanged >= min(written, 1000) - 1
    assert done.num_unchanged + done.num_chunks == done.num_done == 1000
    found = service.search(SearchRequest("What does clause 7 say?", top_k=3)).passages
    assert "d7" in {hit.passage.document_id for hit in found}
    service.close()


@pytest.mark.nightly
def test_ten_thousand_documents_do_not_grow_memory(cache_folder: Path, tmp_path: Path) -> None:
    output, _ = child(tmp_path, 10_000).communicate()
    sizes = [int(line.split()[1]) for line in output.splitlines()]
    assert len(sizes) == 10
    assert max(sizes[4:]) - sizes[3] < MAX_GROWTH_BYTES
