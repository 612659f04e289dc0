"""Shapes of the answers, for ``/docs`` and for clients that generate code from it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """Every error, also in the middle of a stream."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "The request is at fault; `param` names the field."},
    401: {"model": ErrorReply, "description": "No API key, or none that is valid."},
    403: {"model": ErrorReply, "description": "The key lacks the scope."},
    404: {"model": ErrorReply, "description": "There is no such thing."},
    405: {"model": ErrorReply, "description": "The method is not allowed here."},
    408: {"model": ErrorReply, "description": "Not done within the deadline."},
    413: {"model": ErrorReply, "description": "The request is too large."},
    415: {"model": ErrorReply, "description": "The body has the wrong type."},
    429: {"model": ErrorReply, "description": "Too much asked; see `Retry-After`."},
    500: {"model": ErrorReply, "description": "A fault of the service."},
    503: {"model": ErrorReply, "description": "A part of the service is not available."},
}


class UrlCitation(BaseModel):
    start_index: int
    end_index: int
    url: str
    title: str


class Annotation(BaseModel):
    """A marker `[n]` in the content (or, where the text may not be altered, the sentence it would stand in)."""

    type: Literal["url_citation"]
    url_citation: UrlCitation
    source: int
    document_id: str
    chunk_id: str
    chunk_span: list[int | None]
    origin: Literal["model", "attributed"]


class Message(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None
    annotations: list[Annotation]


class Choice(BaseModel):
    index: int
    message: Message
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"] | None
    tokens: list[dict[str, Any]] | None = Field(default=None, description="With speculation.show_accepted.")


class PromptTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Source(BaseModel):
    """A passage in the prompt; `start` and `end` are characters of its document's text."""

    index: int
    document_id: str
    chunk_id: str
    title: str
    text: str
    score: float
    domain: str | None = None
    start: int | None = None
    end: int | None = None
    page: int | None = None
    section: str | None = None
    url: str


class RagReply(BaseModel):
    domain: str
    domain_inferred: bool
    query: str


class SpeculativeDecoding(BaseModel):
    """Counts of the answer's own rounds; a rate for which nothing was tested is null."""

    acceptance_rate: float | None
    accepted_over_drafted: float | None
    mean_acceptance_length: float | None
    num_rounds: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_rejections: int
    acceptance_histogram: list[int]
    rounds_by_cause: dict[str, int]
    drafter: str
    by_drafter: dict[str, dict[str, int]]
    lookahead_hits: int
    lookahead_misses: int
    acceptance_method: str
    lossy: bool


class Metrics(BaseModel):
    speculative_decoding: SpeculativeDecoding
    timings: dict[str, float | None] = Field(description="Seconds by stage, to the first token, and in all.")


class ChatCompletion(BaseModel):
    """OpenAI's `chat.completion`, with `sources`, `rag` and `metrics` beside it."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    sources: list[Source]
    rag: RagReply
    metrics: Metrics


class Found(BaseModel):
    """One passage of a search, best first."""

    document_id: str
    chunk_id: str
    title: str
    text: str
    score: float
    domain: str | None = None
    start: int | None = None
    end: int | None = None
    metadata: dict[str, Any]


class SearchReply(BaseModel):
    object: Literal["list"]
    data: list[Found]
    timings: dict[str, float | None]


class Failure(BaseModel):
    name: str
    reason: str


class Job(BaseModel):
    """An ingestion; progress in documents."""

    object: Literal["job"]
    id: str
    state: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    num_documents: int
    num_done: int
    num_unchanged: int
    num_chunks: int
    failures: list[Failure]
    error: str | None = None


class DocumentReply(BaseModel):
    object: Literal["document"]
    id: str
    domain: str
    title: str
    num_chunks: int
    metadata: dict[str, Any]


class Chunk(BaseModel):
    chunk_id: str
    text: str
    start: int | None = None
    end: int | None = None
    metadata: dict[str, Any]


class DocumentWithChunks(DocumentReply):
    chunks: list[Chunk]


class DocumentList(BaseModel):
    object: Literal["list"]
    data: list[DocumentReply]
    next: str | None = Field(default=None, description="Give it as `after` for the next page.")


class Deleted(BaseModel):
    object: Literal["document.deleted"]
    id: str
    deleted: bool


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Domain(BaseModel):
    id: str
    object: Literal["domain"]


class DomainList(BaseModel):
    object: Literal["list"]
    data: list[Domain]


class Alive(BaseModel):
    status: Literal["alive"]


class Ready(BaseModel):
    status: Literal["ready", "not_ready"]
    not_ready: dict[str, str] = Field(description="What is not ready, and why.")
