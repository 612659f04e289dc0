"""One request while it is being generated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from generation.detokenizer import Decodes, Detokenizer, StopStrings
from generation.grammar import Grammar
from generation.sampling import RequestRandom, TokenCounts
from generation.stats import StatsBuilder
from generation.types import (
    AcceptanceMethod,
    DraftProposal,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    GenerationTimings,
    TokenLogprob,
    Verification,
)

Clock = Callable[[], float]


@dataclass(slots=True)
class _Token:
    """A generated token on its way out: it leaves when the text before its end is safe from stop strings."""

    token_id: int
    start: int
    accepted: bool
    logprob: TokenLogprob | None


class Sequence:
    """Ids, their place in the cache, and what has been given out.

    Invariant while decoding: the keys and values of all ids but the last are in the slot
    (``num_computed == len(token_ids) - 1``).
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Decodes,
        *,
        acceptance: AcceptanceMethod = "token",
        eos_token_ids: tuple[int, ...] = (),
        context_length: int = 1 << 30,
        grammar: Grammar | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.request = request
        self.sampling = request.sampling
        self.token_ids = list(request.prompt_ids)
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_cached_tokens = 0
        self.num_computed = 0
        self.slot: int | None = None
        self.round_id = 0
        self.random = RequestRandom(request.sampling.seed, request.request_id)
        self.counts = TokenCounts(request.prompt_ids)
        self.stats = StatsBuilder(acceptance)
        self.acceptance = acceptance
        self.grammar = grammar
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._ends = frozenset(request.sampling.stop_token_ids) | (
            frozenset() if request.sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self.end_token_ids = tuple(sorted(self._ends))
        self._limit = min(request.sampling.max_tokens, context_length - self.num_prompt_tokens)
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(request.sampling.stop)
        self._text_length = 0
        self._released = 0
        self._pending: list[_Token] = []
        self._clock = clock
        self.arrived_at = clock()
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._limit - self.num_generated

    @property
    def is_prefilling(self) -> bool:
        """Anything but the last id is still to be computed."""
        return self.num_computed < len(self.token_ids) - 1 or self.num_generated == 0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def expired(self, now: float) -> bool:
        deadline = self.request.deadline_seconds
        return deadline is not None and now - self.arrived_at > deadline

    def commit(
        self,
        proposal: DraftProposal,
        verification: Verification,
        logprobs: list[TokenLogprob],
        *,
        counts: bool,
    ) -> GenerationChunk:
        """Take a round's tokens until the answer ends; ``counts``: the round enters the figures."""
        if self.first_token_at is None:
            self.first_token_at = self._clock()
        text, num_kept = "", 0
        for index, token_id in enumerate(verification.token_ids):
            accepted = index < verification.num_accepted
            text += self._take(token_id, accepted, logprobs[index] if logprobs else None)
            num_kept += 1
            if self.is_finished:
                break
        if counts:
            self.stats.add_round(proposal, verification, num_kept)
        self.round_id += 1
        self.num_computed = len(self.token_ids) - 1
        return self._chunk(text)

    def finish(self, reason: FinishReason, error: str | None = None) -> GenerationChunk:
        """End the answer from outside (cancel, deadline, error) and give out what was held back."""
        self.finish_reason, self.error = reason, error
        text = ""
        with contextlib.suppress(Exception):  # it may be the text itself that failed
            text = self._end_of_text()
        return self._chunk(text)

    def _take(self, token_id: int, accepted: bool, logprob: TokenLogprob | None) -> str:
        self.token_ids.append(token_id)
        self.counts.extend((token_id,))
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if token_id in self._ends and self.num_generated > self.sampling.min_tokens:
            self.finish_reason = "stop"
            return self._end_of_text()
        self._pending.append(_Token(token_id, self._text_length, accepted, logprob))
        piece = self._detokenizer.push(token_id)
        self._text_length += len(piece)
        text, stopped = self._stops.push(piece)
        if stopped:
            self.finish_reason = "stop"
            cut = self._released + len(text)
            self._pending = [token for token in self._pending if token.start < cut]
        elif self.num_remaining <= 0:
            self.finish_reason = "length"
            text += self._end_of_text()
        elif self.grammar is not None and self.grammar.is_complete:
            self.finish_reason = "stop"
            text += self._end_of_text()
        self._released += len(text)
        return text

    def _end_of_text(self) -> str:
        text, stopped = self._stops.push(self._detokenizer.flush())
        return text if stopped else text + self._stops.flush()

    def _chunk(self, text: str) -> GenerationChunk:
        if self.is_finished:
            out, self._pending = self._pending, []
        else:
            out = [token for token in self._pending if token.start < self._released or not self.sampling.stop]
            self._pending = self._pending[len(out) :]
        return GenerationChunk(
            request_id=self.request_id,
            text=text,
            token_ids=tuple(token.token_id for token in out),
            logprobs=tuple(token.logprob for token in out if token.logprob is not None),
            finish_reason=self.finish_reason,
            stats=self.stats.build() if self.is_finished else None,
            timings=self._timings() if self.is_finished else None,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated,
            error=self.error,
            num_accepted_tokens=sum(token.accepted for token in out),
            accepted=tuple(token.accepted for token in out),
        )

    def _timings(self) -> GenerationTimings:
        now = self._clock()
        admitted = self.admitted_at if self.admitted_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return GenerationTimings(
            queue_seconds=admitted - self.arrived_at,
            prefill_seconds=max(0.0, first - admitted),
            decode_seconds=max(0.0, now - first),
            time_to_first_token_seconds=max(0.0, first - self.arrived_at),
        )
