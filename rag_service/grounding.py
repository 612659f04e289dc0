"""What an answer stands on: passages searched and ranked, and the prompt made of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rag_service.answer import Progress, Retrieved, majority_domain
from rag_service.backends import RerankerBackend, RetrieverBackend
from rag_service.config import OTHER_DOMAIN, Settings
from rag_service.prompt import Prompt, PromptBudget, build_chat, build_prompt
from rag_service.question import Question
from rag_service.rewrite import rewrite_query
from rag_service.tokenizer import ChatTokenizer
from retrieval.types import ScoredPassage, SearchRequest


@dataclass(frozen=True, slots=True)
class Ground:
    """A prompt; what to tell of it before any token; and the next candidates that are not wholly in it."""

    prompt: Prompt
    retrieved: Retrieved
    leftover: tuple[ScoredPassage, ...] = ()


class Grounding:
    """Searches, ranks and builds prompts. Stages are timed in the request's ``Progress``."""

    def __init__(
        self,
        settings: Settings,
        retriever: RetrieverBackend,
        reranker: RerankerBackend,
        tokenizer: ChatTokenizer,
    ) -> None:
        self._settings = settings
        self._retriever = retriever
        self._reranker = reranker
        self._tokenizer = tokenizer

    async def search(self, request: SearchRequest, rerank: bool, progress: Progress) -> list[ScoredPassage]:
        """Passages best first."""
        result = await self._retriever.search(request)
        progress.stage_seconds["embed"] = result.embed_seconds
        progress.stage_seconds["search"] = result.search_seconds
        passages = list(result.passages)
        if rerank and passages:
            with _timed(progress, "rerank"):
                passages = await self._reranker.rerank(request.query, passages)
        return passages

    async def search_within_deadline(
        self, request: SearchRequest, rerank: bool, progress: Progress
    ) -> list[ScoredPassage]:
        """``search`` for a request that is nothing but a search. Raises ``TimeoutError``."""
        async with asyncio.timeout(self._settings.service.request_deadline_seconds):
            return await self.search(request, rerank, progress)

    async def ground(self, question: Question, progress: Progress) -> Ground:
        """The prompt for ``question``, from passages unless it wants none."""
        progress.domain = question.domain
        return (
            await self._retrieve(question, progress) if question.retrieve else self._plain(question, progress)
        )

    def _plain(self, question: Question, progress: Progress) -> Ground:
        with _timed(progress, "prompt"):
            system = [{"role": "system", "content": question.system}] if question.system else []
            turns = [*system, *question.history, {"role": "user", "content": question.text}]
            prompt = build_chat(self._tokenizer, turns)
        domain = question.domain or OTHER_DOMAIN
        return Ground(prompt, Retrieved((), domain, False, "", dict(progress.stage_seconds)))

    async def _retrieve(self, question: Question, progress: Progress) -> Ground:
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
        retrieved = Retrieved(prompt.sources, progress.domain, inferred is not None, query, stages)
        return Ground(prompt, retrieved, _leftover(prompt, passages[: 2 * budget.top_k]))


def _leftover(prompt: Prompt, passages: list[ScoredPassage]) -> tuple[ScoredPassage, ...]:
    """Those of ``passages`` that the prompt has not or has cut: an answer may still run into their words."""
    whole = {s.passage.chunk_id for s in prompt.sources if s.text == s.passage.text.strip()}
    return tuple(scored for scored in passages if scored.passage.chunk_id not in whole)


@contextmanager
def _timed(progress: Progress, stage: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        progress.stage_seconds[stage] = time.monotonic() - start
