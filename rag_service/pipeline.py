"""The life of a request: search, rerank, prompt, generate, cite, record.

The pipeline knows its neighbours as protocols only (``rag_service.backends``). It runs in one task of its own,
so that cancelling that task ends everything below it, and hands its events to a callback.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from generation.types import GenerationChunk, GenerationError, GenerationRequest
from rag_service.answer import (
    AnswerEnd,
    ChoiceEnd,
    Delta,
    Event,
    Progress,
    Retrieved,
    majority_domain,
)
from rag_service.backends import GeneratorBackend, RecorderBackend, RerankerBackend, RetrieverBackend
from rag_service.citations import CitationStream
from rag_service.config import OTHER_DOMAIN, Settings
from rag_service.errors import ApiError, as_api_error
from rag_service.figures import merged_stats
from rag_service.prompt import Prompt, PromptBudget, PromptSource, build_chat, build_prompt
from rag_service.question import Question
from rag_service.record import RequestRecord
from rag_service.rewrite import rewrite_query
from rag_service.tokenizer import ChatTokenizer, encode_text
from retrieval.types import ScoredPassage, SearchRequest

logger = logging.getLogger(__name__)
Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Backends:
    """The neighbours of the pipeline."""

    retriever: RetrieverBackend
    reranker: RerankerBackend
    generator: GeneratorBackend
    recorder: RecorderBackend


class Pipeline:
    """Answers questions. Stateless but for the record calls under way."""

    def __init__(self, settings: Settings, backends: Backends, tokenizer: ChatTokenizer) -> None:
        self._settings = settings
        self._backends = backends
        self._tokenizer = tokenizer
        self._recording: set[asyncio.Task[None]] = set()

    async def answer(self, question: Question, emit: Emit) -> None:
        """Answer ``question``, giving every event to ``emit``; record it however it ends.

        Raises ``ApiError``. Cancelling this coroutine's task cancels search and generation.
        """
        progress = Progress()
        outcome, code = "cancelled", None
        try:
            async with asyncio.timeout(self._settings.service.request_deadline_seconds):
                await self._answer(question, progress, emit)
            outcome = "ok"
        except asyncio.CancelledError:
            raise
        except BaseExceptionGroup as group:
            error = as_api_error(_first(group))
            outcome, code = error.outcome, error.code
            raise error from None
        except Exception as fault:
            error = as_api_error(fault)
            outcome, code = error.outcome, error.code
            raise error from None
        finally:
            self.record(self._record_of(question, progress, outcome, code))

    async def search(self, request: SearchRequest, rerank: bool, progress: Progress) -> list[ScoredPassage]:
        """Passages best first; their stages are timed in ``progress``."""
        result = await self._backends.retriever.search(request)
        progress.stage_seconds["embed"] = result.embed_seconds
        progress.stage_seconds["search"] = result.search_seconds
        passages = list(result.passages)
        if rerank and passages:
            with _timed(progress, "rerank"):
                passages = await self._backends.reranker.rerank(request.query, passages)
        return passages

    async def search_within_deadline(
        self, request: SearchRequest, rerank: bool, progress: Progress
    ) -> list[ScoredPassage]:
        """``search`` for a request that is nothing but a search. Raises ``TimeoutError``."""
        async with asyncio.timeout(self._settings.service.request_deadline_seconds):
            return await self.search(request, rerank, progress)

    def record(self, record: RequestRecord) -> None:
        """Hand ``record`` over without waiting; a recorder that fails costs a line in the log, no request."""
        task = asyncio.ensure_future(self._deliver(record))
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)

    def record_refusal(
        self, request_id: str, error: ApiError, tenant: str = "default", domain: str | None = None
    ) -> None:
        """Record a request that never came as far as a search."""
        self.record(
            RequestRecord(
                request_id=request_id,
                started_at=time.time(),
                domain=domain or OTHER_DOMAIN,
                tenant=tenant,
                outcome=error.outcome,
                total_seconds=0.0,
                target=self._settings.engine.target.model,
                error_code=error.code,
            )
        )

    async def _deliver(self, record: RequestRecord) -> None:
        try:
            await self._backends.recorder.record(record)
        except Exception:
            logger.exception("The record of request %s was not taken.", record.request_id)

    async def _answer(self, question: Question, progress: Progress, emit: Emit) -> None:
        prompt, leftover = await self._prompt(question, progress, emit)
        requests = [
            self._generation(question, prompt, leftover, progress, i) for i in range(question.num_choices)
        ]
        if len(requests) == 1:
            await self._generate(question, requests[0], 0, prompt.sources, progress, emit)
        else:
            async with asyncio.TaskGroup() as group:
                for choice, request in enumerate(requests):
                    group.create_task(
                        self._generate(question, request, choice, prompt.sources, progress, emit)
                    )
        ends = progress.last_chunks.values()
        emit(
            AnswerEnd(
                stats=merged_stats(chunk.stats for chunk in ends if chunk.stats is not None),
                stage_seconds=dict(progress.stage_seconds),
                time_to_first_token_seconds=progress.first_token_seconds,
                total_seconds=progress.elapsed(),
                num_prompt_tokens=progress.num_prompt_tokens,
                num_cached_tokens=progress.num_cached_tokens,
                num_generated_tokens=progress.num_generated_tokens,
            )
        )

    async def _prompt(
        self, question: Question, progress: Progress, emit: Emit
    ) -> tuple[Prompt, list[ScoredPassage]]:
        """The prompt, with its sources told; and the candidates that are not wholly in it."""
        progress.domain = question.domain
        if not question.retrieve:
            with _timed(progress, "prompt"):
                system = [{"role": "system", "content": question.system}] if question.system else []
                turns = [*system, *question.history, {"role": "user", "content": question.text}]
                prompt = build_chat(self._tokenizer, turns)
            emit(Retrieved((), question.domain or OTHER_DOMAIN, False, "", dict(progress.stage_seconds)))
            return prompt, []
        config = self._settings.prompt
        query = rewrite_query(question.text, question.history) if question.rewrite else question.text
        budget = PromptBudget.of(config, question.top_k)
        request = SearchRequest(
            query=query,
            tenant=question.tenant,
            domain=question.domain,
            top_k=max(config.candidates, budget.top_k),
            filters=question.filters,
            document_ids=question.document_ids,
        )
        passages = await self.search(request, question.rerank, progress)
        if config.min_score is not None:
            passages = [scored for scored in passages if scored.score >= config.min_score]
        inferred = None
        if question.domain is None:
            inferred = majority_domain(tuple(passages[: budget.top_k]), self._settings.service.domains)
        progress.domain = question.domain or inferred or OTHER_DOMAIN
        with _timed(progress, "prompt"):
            prompt = build_prompt(
                self._tokenizer, question.text, passages, question.history, question.system, budget
            )
        stages = dict(progress.stage_seconds)
        emit(Retrieved(prompt.sources, progress.domain, inferred is not None, query, stages))
        whole = {
            source.passage.chunk_id for source in prompt.sources if source.text == source.passage.text.strip()
        }
        return prompt, [
            scored for scored in passages[: 2 * budget.top_k] if scored.passage.chunk_id not in whole
        ]

    def _generation(
        self,
        question: Question,
        prompt: Prompt,
        leftover: list[ScoredPassage],
        progress: Progress,
        choice: int,
    ) -> GenerationRequest:
        seed = question.sampling.seed
        sampling = replace(question.sampling, seed=None if seed is None else seed + choice)
        return GenerationRequest(
            # Of our own: two clients may send the same x-request-id at once, and the engine knows by id.
            request_id=f"{question.request_id[:64]}-{secrets.token_hex(6)}",
            prompt_ids=prompt.token_ids,
            sampling=sampling,
            domain=progress.domain or OTHER_DOMAIN,
            tenant=question.tenant,
            passage_ids=tuple(
                tuple(encode_text(self._tokenizer, scored.passage.text)) for scored in leftover
            ),
            deadline_seconds=self._settings.service.request_deadline_seconds - progress.elapsed(),
            acceptance=question.acceptance,
            mode=question.mode,
        )

    async def _generate(
        self,
        question: Question,
        request: GenerationRequest,
        choice: int,
        sources: tuple[PromptSource, ...],
        progress: Progress,
        emit: Emit,
    ) -> None:
        """One choice from its first token to its end."""
        cited = CitationStream(
            sources,
            question.citations,
            self._settings.prompt.attribution_threshold,
            alter=question.may_alter,
        )
        async with _closed(self._backends.generator.generate(request)) as chunks:
            async for chunk in chunks:
                progress.see(chunk)
                text = cited.feed(chunk.text)
                if chunk.finish_reason is not None:
                    progress.end_choice(choice, chunk)
                    _raise_if_failed(chunk)
                    text += cited.finish(cut=chunk.finish_reason == "length")
                if self._settings.telemetry.keep_text:
                    progress.text[choice] = progress.text.get(choice, "") + text
                if text or chunk.token_ids:
                    emit(Delta(choice, text, chunk.token_ids, chunk.accepted, chunk.logprobs))
                if chunk.finish_reason is not None:
                    emit(ChoiceEnd(choice, chunk.finish_reason, tuple(cited.citations)))
                    return
        raise GenerationError("The target ended its stream before the answer was finished.", "unavailable")

    def _record_of(
        self, question: Question, progress: Progress, outcome: str, code: str | None
    ) -> RequestRecord:
        keep = self._settings.telemetry.keep_text
        ends = progress.last_chunks.values()
        domain = progress.domain or question.domain or OTHER_DOMAIN
        return RequestRecord(
            request_id=question.request_id,
            started_at=progress.started_at,
            domain=domain if domain in self._settings.service.domains else OTHER_DOMAIN,
            tenant=question.tenant,
            outcome=outcome,
            total_seconds=progress.elapsed(),
            stage_seconds=dict(progress.stage_seconds),
            time_to_first_token_seconds=progress.first_token_seconds,
            num_prompt_tokens=progress.num_prompt_tokens,
            num_cached_tokens=progress.num_cached_tokens,
            num_generated_tokens=progress.num_generated_tokens,
            temperature=question.sampling.temperature,
            stats=merged_stats(chunk.stats for chunk in ends if chunk.stats is not None),
            target=self._settings.engine.target.model,
            draft=self._settings.draft.draft.model if self._settings.draft.draft else "",
            mode=question.mode or self._settings.engine.speculation.mode,
            stream=question.stream,
            error_code=code,
            question=question.text if keep else None,
            answer="\n".join(text for _, text in sorted(progress.text.items())) if keep else None,
            trace_id=question.trace_id,
        )


@contextmanager
def _timed(progress: Progress, stage: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        progress.stage_seconds[stage] = time.monotonic() - start


@asynccontextmanager
async def _closed(chunks: AsyncIterator[GenerationChunk]) -> AsyncIterator[AsyncIterator[GenerationChunk]]:
    """``chunks``, closed however the loop over them ends: closing is what cancels the generation."""
    try:
        yield chunks
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


def _raise_if_failed(chunk: GenerationChunk) -> None:
    if chunk.finish_reason == "error":
        raise GenerationError(chunk.error or "The target could not finish the answer.", "generation_failed")
    if chunk.finish_reason == "cancelled":
        raise GenerationError(chunk.error or "The answer was cancelled.", "unavailable")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
