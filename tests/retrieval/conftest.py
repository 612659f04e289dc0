"""Real parts for retrieval's tests: the packaged embedder, loaded once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrieval.config import RetrievalConfig
from retrieval.embedder import SentenceEmbedder
from retrieval.service import RetrievalService

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def cache_folder() -> Path:
    folder = Path(os.environ.get("RAG_SERVICE_CACHE") or Path.home() / ".cache" / "rag-service")
    if not (folder / "models" / "all-minilm-l6-v2" / "config.json").exists():
        pytest.skip("the packaged embedder is not fetched (rag-service models fetch)")
    return folder


@pytest.fixture(scope="session")
def embedder(cache_folder: Path) -> SentenceEmbedder:
    return SentenceEmbedder(RetrievalConfig().embedder, cache_folder)


@pytest.fixture
def service(cache_folder: Path, tmp_path: Path) -> Iterator[RetrievalService]:
    made = RetrievalService(RetrievalConfig(), cache_folder, tmp_path)
    yield made
    made.close()
