"""The life of a request: search, rerank, prompt, generate, cite, record.

The pipeline knows its neighbours as protocols only (``rag_service.backends``). It runs in one task of its own,
so that cancelling that task ends everything below it, and hands its events to a callback.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from generation.types import GenerationChunk, GenerationError, GenerationRequest
from rag_service.answer import AnswerEnd, ChoiceEnd, Delta, Event, Progress
from rag_service.backends import GeneratorBackend, RecorderBackend, RerankerBackend, RetrieverBackend
from rag_service.citations import CitationStream
from rag_service.config import OTHER_DOMAIN, Settings
from rag_service.errors import ApiError, as_api_error
from rag_service.figures import merged_stats
from rag_service.grounding import Ground, Grounding
from rag_service.prompt import NEXT_QUESTION, PromptSource
from rag_service.question import Question
from rag_service.recording import Recording
from rag_service.tokenizer import ChatTokenizer, encode_text

Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Backends:
    """The neighbours of the pipeline."""

    retriever: RetrieverBackend
    reranker: RerankerBackend
    generator: GeneratorBackend
    recorder: RecorderBackend


class Pipeline:
    """Answers questions. ``grounding`` also serves searches alone; ``recording`` also takes refusals."""

    def __init__(self, settings: Settings, backends: Backends, tokenizer: ChatTokenizer) -> None:
        self._settings = settings
        self._generator = backends.generator
        self._tokenizer = tokenizer
        self.grounding = Grounding(settings, backends.retriever, backends.reranker, tokenizer)
        self.recording = Recording(settings, backends.recorder, backends.generator)

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
        except Exception as fault:
            error = _told(fault)
            outcome, code = error.outcome, error.code
            raise error from None
        finally:
            self.recording.answered(question, progress, outcome, code)

    async def _answer(self, question: Question, progress: Progress, emit: Emit) -> None:
        ground = await self.grounding.ground(question, progress)
        emit(ground.retrieved)
        requests = [self._request(question, ground, progress, i) for i in range(question.num_choices)]
        async with asyncio.TaskGroup() as group:
            for choice, request in enumerate(requests):
                sources = ground.prompt.sources
                group.create_task(self._generate(question, request, choice, sources, progress, emit))
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

    def _request(
        self, question: Question, ground: Ground, progress: Progress, choice: int
    ) -> GenerationRequest:
        sampling, prompted = question.sampling, bool(ground.prompt.sources)
        seed = None if sampling.seed is None else sampling.seed + choice
        ends = (NEXT_QUESTION,) if prompted and self._settings.prompt.stop_at_next_question else ()
        return GenerationRequest(
            # Of our own: two clients may send the same x-request-id at once, and the engine knows by id.
            request_id=f"{question.request_id[:64]}-{secrets.token_hex(6)}",
            prompt_ids=ground.prompt.token_ids,
            sampling=replace(sampling, seed=seed, stop=(*sampling.stop, *ends)),
            domain=progress.domain or OTHER_DOMAIN,
            tenant=question.tenant,
            passage_ids=tuple(
                tuple(encode_text(self._tokenizer, scored.passage.text)) for scored in ground.leftover
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
        async with _closed(self._generator.generate(request)) as chunks:
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


def _told(fault: Exception) -> ApiError:
    """The first fault of a group of tasks is the one to tell: the others were cancelled for it."""
    while isinstance(fault, ExceptionGroup):
        fault = fault.exceptions[0]
    return as_api_error(fault)
