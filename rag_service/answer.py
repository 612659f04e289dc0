"""The nouns of one answer as it comes about: what is retrieved, the pieces of text, how it ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from generation.types import FinishReason, GenerationChunk, SpeculationStats, TokenLogprob
from rag_service.citations import Citation
from rag_service.prompt import PromptSource
from retrieval.types import ScoredPassage


@dataclass(frozen=True, slots=True)
class Retrieved:
    """First event: the sources in the prompt, before any token."""

    sources: tuple[PromptSource, ...]
    domain: str
    domain_inferred: bool
    query: str
    stage_seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of choice ``choice``. ``accepted``: for each of ``token_ids``, was it a draft token?"""

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    accepted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The last event of one choice."""

    choice: int
    finish_reason: FinishReason
    citations: tuple[Citation, ...]


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last event: figures of the whole request. Token counts are the target's own."""

    stats: SpeculationStats | None
    stage_seconds: Mapping[str, float]
    time_to_first_token_seconds: float | None
    total_seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


Event = Retrieved | Delta | ChoiceEnd | AnswerEnd


@dataclass(slots=True)
class Progress:
    """What is known so far of one request, also of one that fails: the request record is made of it."""

    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    first_token_seconds: float | None = None
    domain: str | None = None
    last_chunks: dict[int, GenerationChunk] = field(default_factory=dict)
    num_seen_tokens: int = 0
    text: dict[int, str] = field(default_factory=dict)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def see(self, chunk: GenerationChunk) -> None:
        """Note the first token's time and the tokens given so far."""
        if self.first_token_seconds is None and (chunk.token_ids or chunk.text):
            self.first_token_seconds = self.elapsed()
        self.num_seen_tokens += len(chunk.token_ids)

    def end_choice(self, choice: int, chunk: GenerationChunk) -> None:
        """Keep a choice's closing figures; engine stages of several choices show the longest."""
        self.last_chunks[choice] = chunk
        if chunk.timings is not None:
            for stage in ("queue", "prefill", "decode"):
                seconds = float(getattr(chunk.timings, f"{stage}_seconds"))
                self.stage_seconds[stage] = max(self.stage_seconds.get(stage, 0.0), seconds)

    @property
    def num_prompt_tokens(self) -> int:
        return max((chunk.num_prompt_tokens for chunk in self.last_chunks.values()), default=0)

    @property
    def num_cached_tokens(self) -> int:
        return max((chunk.num_cached_tokens for chunk in self.last_chunks.values()), default=0)

    @property
    def num_generated_tokens(self) -> int:
        """The engine's own count of ended choices; of what was seen when none ended."""
        ended = sum(chunk.num_generated_tokens for chunk in self.last_chunks.values())
        return ended or self.num_seen_tokens


def majority_domain(passages: tuple[ScoredPassage, ...], known: tuple[str, ...]) -> str | None:
    """The domain of most of ``passages`` (best first), the best-ranked among equals; None without one."""
    domains = [str(scored.passage.metadata.get("domain")) for scored in passages]
    counts = Counter(domain for domain in domains if domain in known)
    return counts.most_common(1)[0][0] if counts else None
