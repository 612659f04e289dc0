"""Documents with made-up vectors, for the index alone: importing this loads no model."""

from __future__ import annotations

import numpy as np

from retrieval.chunking import chunk_id
from retrieval.index.record import IndexedChunk, IndexedDocument, SparseVector


def make_document(
    document_id: str = "d",
    version: str = "v1",
    num_chunks: int = 2,
    tenant: str = "acme",
    domain: str = "legal",
    text: str = "text",
    metadata: dict[str, object] | None = None,
) -> IndexedDocument:
    """A document with made-up vectors: chunk i points along axis i % 4 and has term i + 1."""
    chunks = [
        IndexedChunk(
            id=chunk_id(tenant, document_id, version, i),
            index=i,
            text=f"{text} {version} {i}",
            start=10 * i,
            end=10 * i + 5,
            section="",
            dense=np.eye(4, dtype=np.float32)[i % 4],
            sparse=SparseVector((i + 1,), (1.0,)),
        )
        for i in range(num_chunks)
    ]
    return IndexedDocument(document_id, tenant, domain, "Title", text, version, metadata or {}, chunks)
