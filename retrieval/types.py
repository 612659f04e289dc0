"""The nouns of retrieval: documents in, scored passages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Metadata = Mapping[str, Any]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Document:
    """A whole text as loaded, before chunking. ``tenant`` owns it; nobody else reads it."""

    id: str
    domain: str
    title: str
    text: str
    metadata: Metadata = field(default_factory=dict)
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class Passage:
    """One chunk. ``metadata`` has ``title``, ``domain``, ``start`` and ``end`` (characters of the document's
    text, so that ``document.text[start:end] == text``) and, where known, ``page``, ``section``, ``source``.
    """

    document_id: str
    chunk_id: str
    text: str
    metadata: Metadata = field(default_factory=dict)
    token_vectors: bytes | None = field(default=None, repr=False, compare=False)
    """Packed vectors for late interaction (``retrieval.token_vectors``); they don't leave the retriever."""
    retrieval_scores: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """First-stage search's fused score, cosine and relative BM25."""
    features: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """What the learned reranker looks at (``retrieval.features``), beside the other hits of the same search."""


@dataclass(frozen=True, slots=True)
class ScoredPassage:
    """A passage with the score of the last stage that ranked it (comparable within one answer only)."""

    passage: Passage
    score: float


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """One search. ``domain`` None searches every domain of the tenant. ``filters``: metadata equality
    (value) or membership (list of values)."""

    query: str
    tenant: str = "default"
    domain: str | None = None
    top_k: int = 20
    filters: Mapping[str, Any] = field(default_factory=dict)
    document_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Passages best first, and the seconds spent embedding and searching."""

    passages: tuple[ScoredPassage, ...]
    embed_seconds: float = 0.0
    search_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """What the index knows of one document."""

    id: str
    domain: str
    title: str
    num_chunks: int
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """An ingestion job: progress in documents, and every file that failed with its reason."""

    id: str
    state: JobState
    num_documents: int = 0
    num_done: int = 0
    num_unchanged: int = 0
    num_chunks: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class JobCounts:
    """Ingestion jobs waiting or running now; those ended, and documents that failed, since the process began."""

    num_waiting: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_failed_documents: int = 0


class Embedder(Protocol):
    """Texts to unit vectors ``[n, dimension]`` float32."""

    @property
    def dimension(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]: ...


class Reranker(Protocol):
    """Scores passages for a query; higher is better; input order is kept."""

    def score(self, query: str, passages: Sequence[Passage]) -> list[float]: ...


class RetrievalError(Exception):
    """A retrieval request that cannot be met; ``code`` is machine-readable, ``str()`` one clear sentence."""

    def __init__(self, message: str, code: str = "retrieval_failed") -> None:
        super().__init__(message)
        self.code = code
