"""The whole step, readable at a glance: schedule → propose → prepare → verify → commit.

One engine owns one target. It is single-threaded: whoever calls ``step`` (a worker thread of the deployment)
also calls ``add`` and ``cancel`` between steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from generation.attention import Segment
from generation.config import EngineConfig
from generation.drafters.link import DraftLink
from generation.drafters.proposer import Proposer
from generation.grammar import GrammarCompiler
from generation.kv_cache import PrefixCache
from generation.model_runner import LoadedModel, ModelRunner
from generation.scheduler import Plan, Scheduler
from generation.sequence import Sequence
from generation.types import (
    NO_PROPOSAL,
    AcceptanceMethod,
    DraftProposal,
    GenerationChunk,
    GenerationError,
    GenerationRequest,
)
from generation.verifier import Verdict, Verifier


class Engine:
    """Continuous batching with exact speculative decoding for one target model."""

    def __init__(
        self,
        target: LoadedModel,
        tokenizer: Any,
        config: EngineConfig,
        *,
        colocated: DraftLink | None = None,
        remote: DraftLink | None = None,
    ) -> None:
        self.config = config
        self.target = target
        self._tokenizer = tokenizer
        slots = config.max_batch_size
        length = min(config.context_length or target.context_length, config.slot_tokens)
        self.runner = ModelRunner(target, slots, length)
        self.prefix_cache = self._make_prefix_cache()
        self.proposer = Proposer(config.speculation, colocated=colocated, remote=remote)
        self._verifier = Verifier(tokenizer, config.speculation.lossy_threshold)
        self._grammars = GrammarCompiler(tokenizer, target.vocab_size)
        self.scheduler = Scheduler(
            self.runner.pool,
            max_batch_size=config.max_batch_size,
            max_waiting=config.max_waiting,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            context_length=length,
            on_admit=self._admitted,
            on_prefilled=self._save_prefix,
            on_finish=self._finished,
        )
        self.step_seconds = 0.05
        self.overhead_seconds = 0.0
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises ``GenerationError`` (or a kind of it) when it cannot be served."""
        compiled = None
        if request.sampling.json_schema is not None:
            compiled = self._grammars.compile(request.sampling.json_schema)
        if any(not 0 <= token_id < self.target.vocab_size for token_id in request.prompt_ids):
            raise GenerationError("The prompt has ids outside the vocabulary.", "invalid_prompt")
        sequence = Sequence(
            request,
            self._tokenizer,
            acceptance=self._acceptance(request),
            eos_token_ids=self.target.eos_token_ids,
            context_length=self.scheduler.context_length,
            grammar=compiled,
        )
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> GenerationChunk | None:
        """End a request; its slot is free on return."""
        return self.scheduler.cancel(request_id)

    def fail(self, request_id: str, message: str) -> GenerationChunk | None:
        """End a request with an error (its step broke); its slot is free, and wiped, on return."""
        return self.scheduler.fail(request_id, message)

    def step(self) -> list[GenerationChunk]:
        """One round for everyone who decodes, and a piece of prompt for those who don't yet."""
        began, forward_before = time.perf_counter(), self.runner.forward_seconds
        plan, chunks = self.scheduler.schedule()
        if not plan:
            return chunks
        starting = [s for s, num_tokens in plan.prefills if s.num_computed + num_tokens == len(s.token_ids)]
        self.proposer.decide([*plan.decoding, *starting])
        drafting = time.perf_counter()
        proposals = self.proposer.propose(plan.decoding, self.step_seconds)
        self.proposer.prepare([*plan.decoding, *starting], [*proposals, *[NO_PROPOSAL] * len(starting)])
        drafted = time.perf_counter() - drafting
        verdicts, first_tokens = self._verify(plan, proposals)
        chunks += self._commit(plan.decoding, verdicts, rounds=True)
        chunks += self._commit(starting, first_tokens, rounds=False)
        self.overhead_seconds += (
            time.perf_counter() - began - drafted - (self.runner.forward_seconds - forward_before)
        )
        self.num_steps += 1
        return chunks

    def generate(self, requests: list[GenerationRequest]) -> Iterator[GenerationChunk]:
        """Run these to their end, for scripts and tests; a refused request yields one error chunk."""
        for request in requests:
            while len(self.scheduler.waiting) >= max(1, self.config.max_waiting) and self.has_work:
                yield from self.step()
            try:
                self.add(request)
            except GenerationError as error:
                yield GenerationChunk(request.request_id, "", finish_reason="error", error=str(error))
        while self.has_work:
            yield from self.step()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot and block is accounted for."""
        self.runner.pool.check_integrity(self.scheduler.check_integrity())
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()

    def _verify(self, plan: Plan, proposals: list[DraftProposal]) -> tuple[list[Verdict], list[Verdict]]:
        """One forward pass of the target over every proposal and every piece of prompt."""
        segments: list[Segment] = []
        rows: list[int] = []
        row = 0
        for sequence, proposal in zip(plan.decoding, proposals, strict=True):
            assert sequence.slot is not None
            ids = [sequence.token_ids[-1], *proposal.token_ids]
            segments.append(Segment(sequence.slot, sequence.num_computed, ids))
            rows.extend(range(row, row + len(ids)))
            row += len(ids)
        num_decode_rows, finishing = row, []
        for sequence, num_tokens in plan.prefills:
            assert sequence.slot is not None
            start = sequence.num_computed
            segments.append(Segment(sequence.slot, start, sequence.token_ids[start : start + num_tokens]))
            row += num_tokens
            if start + num_tokens == len(sequence.token_ids):
                finishing.append(sequence)
                rows.append(row - 1)
        began = time.perf_counter()
        logits = self.runner.forward(segments, rows)
        seconds = time.perf_counter() - began
        self._measure(plan, num_decode_rows, seconds)
        for sequence, num_tokens in plan.prefills:
            self.scheduler.prefilled(sequence, num_tokens)
        decoded = self._verifier.verify(plan.decoding, proposals, logits[:num_decode_rows])
        empty = [NO_PROPOSAL] * len(finishing)
        return decoded, self._verifier.verify(finishing, empty, logits[num_decode_rows:])

    def _commit(
        self, sequences: list[Sequence], verdicts: list[Verdict], *, rounds: bool
    ) -> list[GenerationChunk]:
        chunks = self.scheduler.commit(sequences, verdicts, rounds=rounds)
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            if verdict.verification is not None and not sequence.is_finished:
                self.proposer.committed(sequence, verdict.proposal, verdict.verification, ended=False)
        return chunks

    def _measure(self, plan: Plan, num_rows: int, seconds: float) -> None:
        if plan.prefills or not plan.decoding:
            return
        self.step_seconds += 0.1 * (seconds - self.step_seconds)
        self.proposer.controller.verification.update(num_rows, seconds)
        self.proposer.observe_verification(seconds)

    def _acceptance(self, request: GenerationRequest) -> AcceptanceMethod:
        """Seeded sampling is drafter-invariant, so that a seed means the same text whatever the draft does."""
        method = request.acceptance or self.config.speculation.acceptance
        exact = method in ("token", "block")
        seeded = request.sampling.seed is not None and request.sampling.temperature > 0
        return "coupled" if exact and seeded else method

    def _make_prefix_cache(self) -> PrefixCache | None:
        cache = self.config.cache
        if not cache.prefix_caching:
            return None
        num_blocks = max(1, cache.prefix_tokens // cache.block_size)
        return PrefixCache(self.runner.pool, cache.block_size, num_blocks)

    def _admitted(self, sequence: Sequence) -> int:
        self.proposer.start(sequence)
        assert sequence.slot is not None
        return self.prefix_cache.load(sequence.token_ids, sequence.slot) if self.prefix_cache else 0

    def _save_prefix(self, sequence: Sequence) -> None:
        if self.prefix_cache is not None and sequence.slot is not None and sequence.error is None:
            self.prefix_cache.save(sequence.token_ids, sequence.slot, sequence.num_computed)

    def _finished(self, sequence: Sequence) -> None:
        self._save_prefix(sequence)
        self.proposer.finish(sequence)
