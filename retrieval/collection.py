"""Which collection stands behind the configured name."""

from __future__ import annotations

from pathlib import Path

from retrieval.config import IndexConfig
from retrieval.index.edge import EdgeIndex
from retrieval.index.record import Index
from retrieval.types import RetrievalError


def open_collection(config: IndexConfig, data_folder: Path, fingerprint: str, dimension: int) -> Index:
    """The collection of vectors made as ``fingerprint`` says."""
    if config.url is not None:
        raise RetrievalError("A Qdrant server is not supported yet.", "not_supported")
    folder = (config.folder or data_folder / "index") / f"{config.collection}-{fingerprint}"
    return EdgeIndex(folder, dimension, config.quantization)
