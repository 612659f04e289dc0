"""A child process that ingests many tiny documents, to be watched or killed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from retrieval.config import EmbedderConfig, RetrievalConfig
from retrieval.service import RetrievalService
from retrieval.types import Document

CACHE = Path(os.environ.get("RAG_SERVICE_CACHE") or Path.home() / ".cache" / "rag-service")
CONFIG = RetrievalConfig(embedder=EmbedderConfig(num_threads=1, batch_size=64))


def tiny_documents(count: int) -> Iterator[Document]:
    for number in range(count):
        yield Document(f"d{number}", "legal", f"Note {number}", f"Clause {number} says that rent is due.")


def anonymous_bytes() -> int:
    """Memory of this process that no file backs (the index's mapped files are not in it)."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


def main(folder: Path, count: int) -> None:
    """Prints, after each thousandth document, how many were read and the bytes of memory."""
    service = RetrievalService(CONFIG, CACHE, folder)
    shown = 0

    def watch(now: object) -> None:
        nonlocal shown
        done = int(getattr(now, "num_documents", 0))
        if done // 1000 > shown // 1000:
            print(done, anonymous_bytes(), flush=True)
        shown = done

    service.ingestion.run(tiny_documents(count), watch)
    service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
