"""In-process stand-ins for ``rag_service.backends`` and a tokenizer, for exact logic alone.

They search by shared words and answer with what a test tells them to; nothing here says anything of quality.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from generation.types import (
    GenerationChunk,
    GenerationRequest,
    GenerationTimings,
    SpeculationStats,
    TokenLogprob,
)
from rag_service.pipeline import Backends
from rag_service.record import RequestRecord
from rag_service.wording import content_words
from retrieval.types import (
    Document,
    DocumentInfo,
    JobStatus,
    Passage,
    ScoredPassage,
    SearchRequest,
    SearchResult,
)

LIBRARY = Document(
    "library",
    "general",
    "Library",
    "The library opens at nine on weekdays. Members may borrow six books.",
)
LEASE = Document(
    "lease", "legal", "Lease", "The tenant pays a deposit of two months of rent. Pets need consent."
)
ANSWER = "The library opens at nine on weekdays. Members may borrow six books."
STATS = SpeculationStats(
    num_rounds=4,
    num_draft_tokens=12,
    num_accepted_tokens=8,
    num_rejections=2,
    tested_per_position=(4, 4, 2),
    accepted_per_position=(4, 3, 1),
    acceptance_histogram=(0, 1, 2, 1),
    rounds_by_cause={"all_accepted": 2, "rejected": 2},
    overlap_sum=8.0,
    num_overlap=10,
)


class FakeTokenizer:
    """Characters are ids (plus 10); ``<s>``, ``</s>`` and ``<|im_end|>`` are special tokens 0, 1 and 2."""

    SPECIAL = ("<s>", "</s>", "<|im_end|>")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            special = next((name for name in self.SPECIAL if text.startswith(name)), None)
            ids.append(self.SPECIAL.index(special) if special else ord(text[0]) + 10)
            text = text[len(special or " ") :]
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.SPECIAL[i] if i < 10 else chr(i - 10) for i in token_ids)

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:
        turns = "".join(f"<s>{turn['role']}\n{turn['content']}</s>" for turn in conversation)
        return turns + "<s>assistant\n"

    def get_added_vocab(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.SPECIAL)}


class FakeRetriever:
    """Whole documents as passages, ranked by the words they share with the query."""

    def __init__(self, documents: Sequence[Document] = (LIBRARY, LEASE)) -> None:
        self.by_id = {document.id: document for document in documents}
        self.jobs: dict[tuple[str, str], JobStatus] = {}
        self.searches: list[SearchRequest] = []
        self.files: list[tuple[str, bytes]] = []
        self.delay_seconds = 0.0
        self.error: Exception | None = None
        self.not_ready: dict[str, str] = {}

    async def search(self, request: SearchRequest) -> SearchResult:
        self.searches.append(request)
        await asyncio.sleep(self.delay_seconds)
        if self.error is not None:
            raise self.error
        wanted = set(content_words(request.query))
        found = [
            ScoredPassage(passage_of(document), float(len(wanted & set(content_words(document.text)))))
            for document in self.by_id.values()
            if request.domain in (None, document.domain) and document.tenant == request.tenant
        ]
        best = sorted(found, key=lambda scored: -scored.score)[: request.top_k]
        return SearchResult(tuple(best), embed_seconds=0.001, search_seconds=0.002)

    async def ingest(self, documents: Sequence[Document]) -> JobStatus:
        for document in documents:
            self.by_id[document.id] = document
        return self._job(len(documents), documents[0].tenant)

    async def ingest_files(self, files: Sequence[tuple[str, bytes]], domain: str, tenant: str) -> JobStatus:
        self.files.extend(files)
        for name, content in files:
            self.by_id[name] = Document(name, domain, name, content.decode(), tenant=tenant)
        return self._job(len(files), tenant)

    def _job(self, number: int, tenant: str) -> JobStatus:
        status = JobStatus(f"job-{len(self.jobs) + 1}", "succeeded", number, number, num_chunks=number)
        self.jobs[tenant, status.id] = status
        return status

    async def job(self, job_id: str, tenant: str) -> JobStatus | None:
        return self.jobs.get((tenant, job_id))

    async def cancel_job(self, job_id: str, tenant: str) -> JobStatus | None:
        status = self.jobs.get((tenant, job_id))
        return None if status is None else replace(status, state="cancelled")

    async def documents(
        self, tenant: str, domain: str | None, limit: int, offset: str | None
    ) -> tuple[list[DocumentInfo], str | None]:
        mine = sorted(d.id for d in self.by_id.values() if d.tenant == tenant and domain in (None, d.domain))
        rest = [name for name in mine if offset is None or name > offset]
        page = [_info(self.by_id[name]) for name in rest[:limit]]
        return page, page[-1].id if len(rest) > limit else None

    async def document(self, document_id: str, tenant: str) -> tuple[DocumentInfo, list[Passage]] | None:
        document = self.by_id.get(document_id)
        if document is None or document.tenant != tenant:
            return None
        return _info(document), [passage_of(document)]

    async def delete(self, document_id: str, tenant: str) -> bool:
        document = self.by_id.get(document_id)
        if document is None or document.tenant != tenant:
            return False
        del self.by_id[document_id]
        return True

    async def ready(self) -> dict[str, str]:
        return self.not_ready


class FakeReranker:
    """Leaves the order as it is."""

    async def rerank(self, query: str, passages: Sequence[ScoredPassage]) -> list[ScoredPassage]:
        return list(passages)

    async def ready(self) -> dict[str, str]:
        return {}


class FakeGenerator:
    """Says ``text`` in pieces of ``piece`` characters, each one token; stops at ``max_tokens`` pieces."""

    def __init__(self, text: str = ANSWER, piece: int = 4) -> None:
        self.text = text
        self.piece = piece
        self.delay_seconds = 0.0
        self.error: Exception | None = None
        self.error_after = 0
        self.requests: list[GenerationRequest] = []
        self.num_running = 0
        self.num_closed_early = 0
        self.on_request: Callable[[GenerationRequest], None] | None = None
        self.hold: asyncio.Event | None = None

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self.requests.append(request)
        self.num_running += 1
        done = False
        try:
            async for chunk in self._chunks(request):
                done = chunk.finish_reason is not None
                yield chunk
        finally:
            self.num_running -= 1
            self.num_closed_early += not done

    async def _chunks(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        if self.on_request is not None:
            self.on_request(request)
        if self.hold is not None:
            await self.hold.wait()
        pieces = [self.text[i : i + self.piece] for i in range(0, len(self.text), self.piece)]
        given = pieces[: request.sampling.max_tokens]
        for number, text in enumerate(given):
            if self.error is not None and number >= self.error_after:
                raise self.error
            await asyncio.sleep(self.delay_seconds)
            yield GenerationChunk(
                request.request_id,
                text,
                token_ids=(ord(text[0]) + 10,),
                accepted=(number % 2 == 0,),
                logprobs=(TokenLogprob(1, text, -0.5, ((1, text, -0.5),)),)
                if request.sampling.logprobs is not None
                else (),
            )
        yield GenerationChunk(
            request.request_id,
            "",
            finish_reason="stop" if len(given) == len(pieces) else "length",
            stats=STATS,
            timings=GenerationTimings(0.001, 0.01, 0.02, 0.011),
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=3,
            num_generated_tokens=len(given),
        )

    async def status(self) -> dict[str, Any]:
        return {"target": "fake", "draft": "small", "draft_fingerprint": "0123456789"}

    async def ready(self) -> dict[str, str]:
        return {}


class FakeRecorder:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.queries: list[dict[str, Any]] = []
        self.error: Exception | None = None

    async def record(self, record: RequestRecord) -> None:
        if self.error is not None:
            raise self.error
        self.records.append(record)

    async def acceptance(self, query: dict[str, Any]) -> dict[str, Any]:
        self.queries.append(query)
        return {"domains": {}, "window": "a/b", "group_by": ["domain"]}

    async def metrics(self) -> str:
        return f"rag_requests_total {len(self.records)}\n"

    async def ready(self) -> dict[str, str]:
        return {}


class Fakes:
    """The four of them, each at hand for a test to set."""

    def __init__(self) -> None:
        self.retriever = FakeRetriever()
        self.reranker = FakeReranker()
        self.generator = FakeGenerator()
        self.recorder = FakeRecorder()

    @property
    def backends(self) -> Backends:
        return Backends(self.retriever, self.reranker, self.generator, self.recorder)


def passage_of(document: Document, chunk_id: str | None = None) -> Passage:
    """The whole document as one passage."""
    metadata = {
        "title": document.title,
        "domain": document.domain,
        "start": 0,
        "end": len(document.text),
        **document.metadata,
    }
    return Passage(document.id, chunk_id or f"{document.id}#0", document.text, metadata)


def _info(document: Document) -> DocumentInfo:
    return DocumentInfo(document.id, document.domain, document.title, 1, document.metadata)
