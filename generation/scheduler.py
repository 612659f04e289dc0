"""Who runs next: admission, batches and the only place where sequences change. No torch here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from generation.sequence import Sequence
from generation.types import (
    DraftProposal,
    GenerationChunk,
    GenerationError,
    PromptTooLong,
    QueueFull,
    TokenLogprob,
    Verification,
)


class Slots(Protocol):
    """The part of the cache that admission needs."""

    def allocate(self) -> int | None: ...

    def free(self, slot: int, *, poisoned: bool | None = False) -> None: ...


class Outcome(Protocol):
    """One sequence's verdict (``generation.verifier.Verdict``)."""

    @property
    def proposal(self) -> DraftProposal: ...

    @property
    def verification(self) -> Verification | None: ...

    @property
    def logprobs(self) -> list[TokenLogprob] | None: ...

    @property
    def error(self) -> GenerationError | None: ...


@dataclass(slots=True)
class Plan:
    """One step: the sequences that decode a round, and prompt pieces ``(sequence, number of tokens)``."""

    decoding: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefills)


class Scheduler:
    """First come, first served; a slot a sequence; prompts in chunks beside the running rounds."""

    def __init__(
        self,
        slots: Slots,
        *,
        max_batch_size: int,
        max_waiting: int,
        prefill_chunk_tokens: int,
        context_length: int,
        on_admit: Callable[[Sequence], int] = lambda sequence: 0,
        on_prefilled: Callable[[Sequence], None] = lambda sequence: None,
        on_finish: Callable[[Sequence], None] = lambda sequence: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_admit`` may fill the slot's beginning from the prefix cache and returns how many tokens."""
        self._slots = slots
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._chunk = prefill_chunk_tokens
        self.context_length = context_length
        self._on_admit = on_admit
        self._on_prefilled = on_prefilled
        self._on_finish = on_finish
        self._clock = clock
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ``PromptTooLong``, ``QueueFull`` or ``GenerationError``."""
        if sequence.num_prompt_tokens == 0:
            raise GenerationError("The prompt is empty.", "empty_prompt")
        if sequence.num_prompt_tokens >= self.context_length:
            raise PromptTooLong(sequence.num_prompt_tokens, self.context_length)
        if sequence.sampling.max_tokens < 1:
            raise GenerationError("max_tokens must be at least 1.", "invalid_max_tokens")
        if any(other.request_id == sequence.request_id for other in (*self.waiting, *self.running)):
            raise GenerationError(f"A request with id {sequence.request_id} is running.", "duplicate_request")
        free = self._max_batch_size - len(self.running)
        if len(self.waiting) - free >= self._max_waiting:
            raise QueueFull(len(self.waiting))
        self.waiting.append(sequence)

    def cancel(self, request_id: str) -> GenerationChunk | None:
        """End a request now; its slot is free on return. None if it is not here (any more)."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request_id == request_id:
                # Its logits may not have been looked at since its last tokens were computed.
                return self._end(sequence, sequence.finish("cancelled"), poisoned=None)
        return None

    def fail(self, request_id: str, message: str) -> GenerationChunk | None:
        """End a request with an error; None if it is not here."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request_id == request_id:
                return self._end(sequence, sequence.finish("error", message), poisoned=True)
        return None

    def schedule(self) -> tuple[Plan, list[GenerationChunk]]:
        """Expire, admit and choose. Also returns the last chunks of requests beyond their deadline."""
        now = self._clock()
        late = [sequence for sequence in (*self.running, *self.waiting) if sequence.expired(now)]
        ended = [
            self._end(s, s.finish("error", "The request's deadline has passed."), poisoned=None) for s in late
        ]
        self._admit(now)
        plan = Plan()
        budget = self._chunk
        for sequence in self.running:
            if not sequence.is_prefilling:
                plan.decoding.append(sequence)
            elif budget > 0:
                num_tokens = min(budget, len(sequence.token_ids) - sequence.num_computed)
                plan.prefills.append((sequence, num_tokens))
                budget -= num_tokens
        return plan, ended

    def prefilled(self, sequence: Sequence, num_tokens: int) -> None:
        """Note computed prompt tokens. What they are worth (a prefix to keep) shows with their logits."""
        sequence.num_computed += num_tokens

    def commit(
        self, sequences: Seq[Sequence], outcomes: Seq[Outcome], *, rounds: bool
    ) -> list[GenerationChunk]:
        """Take each verification into its sequence: the only mutation. Failed requests end alone."""
        chunks = []
        for sequence, outcome in zip(sequences, outcomes, strict=True):
            if outcome.error is None:
                assert outcome.verification is not None
                if not rounds:
                    self._on_prefilled(sequence)
                try:
                    chunk = sequence.commit(
                        outcome.proposal, outcome.verification, outcome.logprobs or [], counts=rounds
                    )
                except Exception as error:  # it ends alone, whatever it is
                    message = str(error) if isinstance(error, GenerationError) else repr(error)
                    chunk = sequence.finish("error", message)
            else:
                chunk = sequence.finish("error", str(outcome.error))
            poisoned = outcome.error is not None and outcome.error.code == "nan_logits"
            chunks.append(self._end(sequence, chunk, poisoned=poisoned) if sequence.is_finished else chunk)
        return chunks

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self._max_batch_size:
            slot = self._slots.allocate()
            if slot is None:
                return
            sequence = self.waiting.popleft()
            sequence.slot = slot
            sequence.admitted_at = now
            self.running.append(sequence)
            sequence.num_cached_tokens = sequence.num_computed = self._on_admit(sequence)

    def _end(
        self, sequence: Sequence, chunk: GenerationChunk, *, poisoned: bool | None = False
    ) -> GenerationChunk:
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._on_finish(sequence)
        if sequence.slot is not None:
            self._slots.free(sequence.slot, poisoned=poisoned)
            sequence.slot = None
        return chunk

    def check_integrity(self) -> list[int]:
        """Slots owned by running sequences; raises AssertionError when the books don't balance."""
        owned = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert len(owned) == len(self.running), "a running sequence has no slot"
        assert all(sequence.slot is None for sequence in self.waiting), "a waiting sequence has a slot"
        for sequence in self.running:
            assert not sequence.is_finished, "a finished sequence is still running"
            assert 0 <= sequence.num_computed <= len(sequence.token_ids), "computed beyond the ids"
        return owned
