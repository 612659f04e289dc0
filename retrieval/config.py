"""Typed, frozen settings of retrieval. Nothing here reads a file or the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

SearchMode = Literal["hybrid", "dense", "sparse"]
RerankerKind = Literal["late_interaction", "cross_encoder", "none"]


class Frozen(BaseModel):
    """Immutable settings that refuse unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EmbedderConfig(Frozen):
    """The sentence-transformers model that makes dense vectors and token vectors.

    ``model``: a packaged name (``all-minilm-l6-v2``, looked up in the model cache), a folder or a hub id.
    """

    model: str = "all-minilm-l6-v2"
    revision: str | None = None
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda:n``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    batch_size: int = Field(default=16, ge=1)
    num_threads: int = Field(default=0, ge=0)
    """Threads of one forward pass on a CPU; 0 leaves the process's own choice."""
    query_prefix: str = ""
    passage_prefix: str = ""
    """Instructions that some models want before queries and passages."""


class ChunkingConfig(Frozen):
    """How documents are cut. Counts are tokens of the embedder's own tokenizer."""

    max_tokens: int = Field(default=224, ge=16, le=4096)
    min_fill: float = Field(default=0.7, gt=0.0, le=1.0)
    """A chunk counts as full from this part of ``max_tokens`` on, so that it can end at a better boundary."""
    overlap_tokens: int = Field(default=24, ge=0)
    context_tokens: int = Field(default=40, ge=0)
    """Title, section and enclosing lines that are embedded before each chunk, at most this long; 0: none."""

    @model_validator(mode="after")
    def _overlap_fits(self) -> ChunkingConfig:
        if self.overlap_tokens * 2 > self.max_tokens:
            raise ValueError("overlap_tokens must be at most half of max_tokens")
        return self


class IndexConfig(Frozen):
    """Where vectors live: embedded in a folder (one process), or a Qdrant server by ``url``."""

    url: str | None = None
    api_key: SecretStr | None = None
    tls_ca: Path | None = None
    """A certificate authority file for a server with a private certificate."""
    timeout_seconds: float = Field(default=10.0, gt=0.0)
    num_retries: int = Field(default=3, ge=0)
    """How often a call to the server that failed in transport is tried again, with growing pauses."""
    folder: Path | None = None
    """The embedded index's folder; None: ``index`` in the service's data folder."""
    collection: str = Field(default="rag", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """The alias searched; the collection behind it is named for what its vectors are made of."""
    quantization: Literal["none", "int8"] = "none"
    """Scalar quantisation of the dense vectors in memory; worth it beyond some 100,000 chunks."""
    optimize_every: int = Field(default=5000, ge=0)
    """Embedded index: build search structures after this many written chunks; 0: only at a job's end."""


class SearchConfig(Frozen):
    """Hybrid search: two candidate lists, fused, and lifted by their documents.

    ``fusion``: ``scores`` adds cosine and BM25 (over its best); ``rrf`` adds weighted reciprocal ranks. Scores
    won here by .01 to .02 nDCG@10 at each one's best weights (docs/retrieval.md).
    """

    mode: SearchMode = "hybrid"
    fusion: Literal["scores", "rrf"] = "scores"
    dense_weight: float = Field(default=1.0, ge=0.0)
    sparse_weight: float = Field(default=0.6, ge=0.0)
    document_weight: float = Field(default=1.0, ge=0.0)
    """How much of its document's best score each passage gets on top (hybrid search only); 0: nothing, and
    the best document's other chunks aren't looked at."""
    rrf_k: int = Field(default=10, ge=1)
    num_candidates: int = Field(default=60, ge=1, le=1000)
    """How many of each list are fused."""
    neighbours: int = Field(default=0, ge=0, le=5)
    """Chunks before and after a hit that are joined to its text."""
    near_duplicate_threshold: float = Field(default=1.0, gt=0.0, le=1.0)
    """A passage is dropped when this part of its word 5-grams stands in a better one; 1: only copies."""


class RerankerConfig(Frozen):
    """What orders the candidates. ``model``: for ``cross_encoder``, a hub id or a folder; for
    ``late_interaction``, a folder that ``rag-service reranker train`` wrote
    (None: the packaged one)."""

    kind: RerankerKind = "late_interaction"
    model: str | None = None
    revision: str | None = None
    device: str = "auto"
    batch_size: int = Field(default=32, ge=1)
    num_threads: int = Field(default=0, ge=0)
    hybrid_weight: float = Field(default=5.0, ge=0.0)
    """How much the hybrid search's own score counts beside ``late_interaction``'s network, which knows little of
    documents unlike those it was trained on; 20 leaves it only what it is sure of."""
    max_batch_passages: int = Field(default=256, ge=1)
    """The most passages of several requests that are scored together."""


class IngestionConfig(Frozen):
    """Bounds of ingestion."""

    max_file_bytes: int = Field(default=64 * 2**20, ge=1)
    max_archive_bytes: int = Field(default=512 * 2**20, ge=1)
    """The most a zip file may unpack to: a bomb is refused by name."""
    max_document_characters: int = Field(default=5_000_000, ge=1)
    max_queued_jobs: int = Field(default=1000, ge=1)
    """Jobs that may wait; more are refused as too many requests."""
    max_kept_jobs: int = Field(default=1000, ge=1)


class RetrievalConfig(Frozen):
    """Everything that retrieval can be told."""

    embedder: EmbedderConfig = EmbedderConfig()
    chunking: ChunkingConfig = ChunkingConfig()
    index: IndexConfig = IndexConfig()
    search: SearchConfig = SearchConfig()
    reranker: RerankerConfig = RerankerConfig()
    ingestion: IngestionConfig = IngestionConfig()
