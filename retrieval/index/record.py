"""What the index stores of one chunk, and how it is asked: shared by both engines."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from retrieval.fusion import Fused, Fusion
from retrieval.types import DocumentInfo, Passage, RetrievalError, ScoredPassage

DENSE, SPARSE = "dense", "sparse"
KEYWORD_FIELDS = ("domain", "document_id", "tags")
"""Indexed payload fields beside ``tenant``, which is indexed as the tenant."""

HIT_FIELDS = (
    "document_id",
    "domain",
    "title",
    "section",
    "text",
    "start",
    "end",
    "chunk_index",
    "stamp",
    "meta",
)
INFO_FIELDS = ("document_id", "domain", "title", "num_chunks", "meta")
_MAX_TAG = 256
"""Longer texts are no filter values and are not indexed as such."""


@dataclass(frozen=True, slots=True)
class SparseVector:
    """BM25 term weights by hashed term id."""

    indices: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class IndexedChunk:
    """One chunk with its vectors. ``dense``: ``[dimension]`` of length 1."""

    id: str
    index: int
    text: str
    start: int
    end: int
    section: str
    dense: npt.NDArray[np.float32]
    sparse: SparseVector
    token_vectors: bytes | None = None


@dataclass(frozen=True, slots=True)
class IndexedDocument:
    """A document ready to be written. ``text`` is kept (with its first chunk) so that the collection can be
    rebuilt with another model without asking for the files again."""

    id: str
    tenant: str
    domain: str
    title: str
    text: str
    version: str
    metadata: Mapping[str, Any]
    chunks: Sequence[IndexedChunk]


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """One search over one tenant's chunks. A missing vector leaves its list out."""

    tenant: str
    dense: npt.NDArray[np.float32] | None
    sparse: SparseVector | None
    limit: int
    fusion: Fusion = field(default_factory=Fusion)
    domain: str | None = None
    document_ids: tuple[str, ...] = ()
    filters: Mapping[str, Any] = field(default_factory=dict)
    with_token_vectors: bool = False


class Index(Protocol):
    """A collection of chunks. Every call names a tenant and touches nothing of another's."""

    def version(self, tenant: str, document_id: str) -> str | None:
        """The digest of the live version; None when there is no such document."""
        ...

    def replace(self, document: IndexedDocument) -> None:
        """Write the document; readers see all of the old version or all of the new one."""
        ...

    def delete(self, tenant: str, document_id: str) -> bool: ...

    def search(self, query: IndexQuery) -> list[ScoredPassage]: ...

    def passages(self, tenant: str, document_id: str, indices: Sequence[int] | None = None) -> list[Passage]:
        """Chunks of one document in order: all, or those at ``indices``."""
        ...

    def documents(
        self, tenant: str, domain: str | None, limit: int, offset: str | None
    ) -> tuple[list[DocumentInfo], str | None]: ...

    def document(self, tenant: str, document_id: str) -> DocumentInfo | None: ...

    def text(self, tenant: str, document_id: str) -> str:
        """The document's whole text; empty when there is no such document."""
        ...

    def sources(self, limit: int, offset: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """Pages of every tenant's documents as stored (fields of ``Document``): for rebuilding and backup."""
        ...

    def count(self) -> int:
        """Live chunks of all tenants."""
        ...

    def optimize(self) -> None: ...

    def close(self) -> None: ...


def payload_of(document: IndexedDocument, chunk: IndexedChunk, stamp: int, live: int) -> dict[str, Any]:
    """What is stored beside the vectors; caller-given metadata stands apart under ``meta``.

    ``live`` is 1 once readers may see the chunk: a number, for the embedded engine can't match truth values.
    """
    payload: dict[str, Any] = {
        "tenant": document.tenant,
        "domain": document.domain,
        "document_id": document.id,
        "version": document.version,
        "stamp": stamp,
        "live": live,
        "chunk_index": chunk.index,
        "num_chunks": len(document.chunks),
        "title": document.title,
        "section": chunk.section,
        "text": chunk.text,
        "start": chunk.start,
        "end": chunk.end,
        "meta": dict(document.metadata),
        "tags": tags_of({**document.metadata, "title": document.title, "section": chunk.section}),
    }
    if chunk.token_vectors is not None:
        payload["tokens"] = base64.b64encode(chunk.token_vectors).decode("ascii")
    if chunk.index == 0:
        payload["document_text"] = document.text
    return payload


def passage_of(point_id: str, payload: Mapping[str, Any], scores: tuple[float, ...] = ()) -> Passage:
    """A passage as promised by ``retrieval.types``: own fields go before the caller's metadata."""
    metadata = dict(payload.get("meta") or {})
    metadata.update(
        title=payload["title"],
        domain=payload["domain"],
        start=payload["start"],
        end=payload["end"],
        chunk_index=payload["chunk_index"],
    )
    if payload.get("section"):
        metadata["section"] = payload["section"]
    page = page_at(metadata.pop("page_starts", None), payload["start"])
    if page is not None:
        metadata["page"] = page
    tokens = payload.get("tokens")
    return Passage(
        document_id=payload["document_id"],
        chunk_id=point_id,
        text=payload["text"],
        metadata=metadata,
        token_vectors=base64.b64decode(tokens) if tokens else None,
        retrieval_scores=scores,
    )


def page_at(page_starts: Sequence[int] | None, offset: int) -> int | None:
    """The page (from 1) that holds character ``offset``; ``page_starts[i]`` is where page i + 1 begins."""
    if not page_starts:
        return None
    return int(np.searchsorted(np.asarray(page_starts), offset, side="right"))


def info_of(payload: Mapping[str, Any]) -> DocumentInfo:
    metadata = {key: value for key, value in (payload.get("meta") or {}).items() if key != "page_starts"}
    return DocumentInfo(
        id=payload["document_id"],
        domain=payload["domain"],
        title=payload["title"],
        num_chunks=payload["num_chunks"],
        metadata=metadata,
    )


def source_of(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": payload["document_id"],
        "tenant": payload["tenant"],
        "domain": payload["domain"],
        "title": payload["title"],
        "text": payload["document_text"],
        "metadata": dict(payload.get("meta") or {}),
    }


SOURCE_FIELDS = ("document_id", "tenant", "domain", "title", "document_text", "meta")


Condition = tuple[str, Sequence[str | int]]
"""A payload field and the values that it may have."""


def matching(**fields: str | int) -> list[Condition]:
    """The conditions that each field has just this value."""
    return [(name, [value]) for name, value in fields.items()]


def filter_conditions(query: IndexQuery) -> list[Condition]:
    """What a hit must meet, the tenant first.

    Caller-given names reach only ``tags``, which hold the caller's own metadata, title and section: no filter
    can speak about tenants. Raises ``RetrievalError`` for values that can't be filtered by.
    """
    conditions: list[Condition] = [("tenant", [query.tenant])]
    if query.domain is not None:
        conditions.append(("domain", [query.domain]))
    if query.document_ids:
        conditions.append(("document_id", list(query.document_ids)))
    for name, value in query.filters.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        tags = [tag(name, item) for item in values]
        if not tags or any(item is None for item in tags):
            raise RetrievalError(
                f"The filter {name!r} takes a text, a number, true or false, or a list of these.",
                "invalid_filter",
            )
        conditions.append(("tags", [item for item in tags if item is not None]))
    return conditions


def tags_of(metadata: Mapping[str, Any]) -> list[str]:
    """What a chunk can be filtered by: a tag for every scalar, and for every scalar of a list."""
    tags: list[str] = []
    for name, value in metadata.items():
        if name != "page_starts":
            for item in value if isinstance(value, (list, tuple)) else [value]:
                made = tag(name, item)
                if made is not None and len(made) <= _MAX_TAG:
                    tags.append(made)
    return tags


def tag(name: str, value: Any) -> str | None:
    """One name and value as an exact text that keeps 1, true and "1" apart; None for what is no scalar."""
    return json.dumps([name, value], ensure_ascii=False) if isinstance(value, (str, int, float)) else None


Point = tuple[str, dict[str, Any]]
"""A chunk's id and payload."""


def newest_only(points: Sequence[Point]) -> list[Point]:
    """Of each document only the newest version's chunks: on a server a reader may come between a version's
    going live and its predecessor's removal."""
    newest: dict[str, int] = {}
    for _, payload in points:
        document_id = payload["document_id"]
        newest[document_id] = max(newest.get(document_id, 0), payload["stamp"])
    return [point for point in points if point[1]["stamp"] == newest[point[1]["document_id"]]]


def hits_of(ranked: Sequence[Fused], points: Sequence[Point]) -> list[ScoredPassage]:
    """Fused candidates with their payloads as scored passages, in the order of ``ranked``."""
    payloads = dict(newest_only(points))
    return [
        ScoredPassage(passage_of(candidate.id, payloads[candidate.id], candidate.scores), candidate.score)
        for candidate in ranked
        if candidate.id in payloads
    ]
