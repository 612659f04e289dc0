"""The target's part of a trace: one answer's wait, prefill and rounds."""

from __future__ import annotations

import time

from generation.types import GenerationChunk, GenerationRequest
from rag_service import tracing

MAX_ROUNDS = 128
"""So many rounds are told of one by one; the figures beside them cover all."""


class AnswerSpan:
    """Watches the chunks of one answer. Costs nothing worth naming while nothing is recorded."""

    def __init__(self, trace: str | None, request: GenerationRequest) -> None:
        attributes: dict[str, str | int] = {
            "rag.domain": request.domain,
            "rag.num_prompt_tokens": len(request.prompt_ids),
        }
        self._span = tracing.open_span("target", trace, attributes)
        self._is_recording = self._span.is_recording()
        self._rounds: list[tuple[int, int, int]] = []
        self._last: GenerationChunk | None = None

    def see(self, chunk: GenerationChunk) -> None:
        """One more piece: what a round, or several whose text came at once, have given."""
        if not self._is_recording:
            return
        if chunk.token_ids and len(self._rounds) < MAX_ROUNDS:
            self._rounds.append((time.time_ns(), len(chunk.token_ids), chunk.num_accepted_tokens))
        if chunk.finish_reason is not None:
            self._last = chunk

    def end(self) -> None:
        """The answer is over, or nobody wants it any more."""
        if self._is_recording:
            self._tell()
        self._span.end()

    def _tell(self) -> None:
        last = self._last
        self._span.set_attribute("rag.finish_reason", (last.finish_reason if last else None) or "left")
        if last is None or last.timings is None:
            return
        timings, ends = last.timings, time.time_ns()
        rounds_began = ends - int(timings.decode_seconds * 1e9)
        before = {"queue": timings.queue_seconds, "prefill": timings.prefill_seconds}
        tracing.past_spans(self._span, before, end_ns=rounds_began)
        attributes: dict[str, int | float] = {"rag.num_generated_tokens": last.num_generated_tokens}
        if last.stats is not None:
            attributes |= {
                "rag.num_rounds": last.stats.num_rounds,
                "rag.num_draft_tokens": last.stats.num_draft_tokens,
                "rag.num_accepted_tokens": last.stats.num_accepted_tokens,
                "rag.waited_draft_seconds": last.stats.waited_draft_seconds,
            }
        parent = tracing.traceparent_of(self._span)
        rounds = tracing.open_span("rounds", parent, attributes, start_ns=rounds_began)
        for at, num_tokens, num_accepted in self._rounds:
            rounds.add_event("round", {"num_tokens": num_tokens, "num_accepted": num_accepted}, at)
        rounds.end(ends)
