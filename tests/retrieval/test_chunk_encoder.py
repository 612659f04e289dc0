"""Chunks are encoded on as many threads as there are cores to use, and come out the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from retrieval.chunk_encoder import ChunkEncoder
from retrieval.chunking import Chunk, Chunker
from retrieval.config import ChunkingConfig
from retrieval.embedder import SentenceEmbedder
from retrieval.index.record import IndexedChunk
from retrieval.sparse import Bm25Encoder
from retrieval.types import Document


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def batches(embedder: SentenceEmbedder) -> list[list[Chunk]]:
    chunker = Chunker(ChunkingConfig(max_tokens=32, overlap_tokens=4), embedder.tokenizer)
    text = "\n\n".join(f"The tenant of house {i} pays {i * 7} pounds a month in advance." for i in range(40))
    chunks = chunker.chunk(Document("lease", "legal", "Leases", text))
    return [chunks[:9], chunks[9:13], chunks[13:]]


def encoded(embedder: SentenceEmbedder) -> list[list[IndexedChunk]]:
    encoder = ChunkEncoder(embedder, Bm25Encoder(), None)
    with encoder.running() as encode:
        futures = [encode(batch) for batch in batches(embedder)]
        return [future.result() for future in futures]


def test_several_threads_make_the_same_in_the_same_order(
    embedder: SentenceEmbedder, two_threads: None
) -> None:
    together = encoded(embedder)
    torch.set_num_threads(1)
    alone = encoded(embedder)
    for ours, theirs, asked in zip(together, alone, batches(embedder), strict=True):
        assert [chunk.id for chunk in ours] == [chunk.id for chunk in theirs] == [chunk.id for chunk in asked]
        for one, other in zip(ours, theirs, strict=True):
            assert float(np.dot(one.dense, other.dense)) > 0.999
            assert one.sparse == other.sparse


def test_each_thread_computes_alone_and_other_threads_keep_their_number(
    embedder: SentenceEmbedder, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: dict[str, int] = {}
    both = threading.Barrier(2, timeout=30)  # two batches are computed at the same time, or this breaks
    forward = embedder._forward

    def watched(texts: list[str]) -> object:
        if threading.current_thread().name not in inside:
            inside[threading.current_thread().name] = torch.get_num_threads()
            both.wait()
        return forward(texts)

    monkeypatch.setattr(embedder, "_forward", watched)
    encoded(embedder)
    assert list(inside.values()) == [1, 1]
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), later) == (2, [2])
