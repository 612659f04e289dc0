"""Pairs whose acceptance rate is known exactly: Markov models whose every row has the same overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from generation.config import EngineConfig, SpeculationConfig
from generation.distillation.prompts import DistillationPrompt
from generation.types import DrafterCounts, SpeculationStats
from rag_service.measurement import Pair, RequestOutcome
from tests.generation.fakes import LetterTokenizer, markov_model

TARGET_ROW = (0.6, 0.3, 0.1)
DRAFT_ROW = (0.3, 0.5, 0.2)
"""Speculation.md, section 2: their overlap is 0.7."""


def rotated(row: Sequence[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """A table whose row for token t is ``row`` rotated by t: every state has the same probabilities."""
    return np.stack([np.roll(row, token) for token in range(len(row))])


def known_pair(target: Sequence[float] = TARGET_ROW, draft: Sequence[float] = DRAFT_ROW) -> Pair:
    """A pair with α = Σ min(target, draft) at temperature 1, whose proposals have K tokens, as theory has them."""
    config = EngineConfig(speculation=SpeculationConfig(adaptive_length=False))
    return Pair(markov_model(rotated(target)), LetterTokenizer(), markov_model(rotated(draft)), config)


def letter_prompts(count: int, domains: Sequence[str] = ("red",)) -> list[DistillationPrompt]:
    return [
        DistillationPrompt(f"p{number}", domains[number % len(domains)], f"question {number}", (number % 3,))
        for number in range(count)
    ]


def paced(
    outcomes: Sequence[RequestOutcome], seconds_per_round: float, num_prefill_rounds: int = 0
) -> list[RequestOutcome]:
    """The same outcomes with times computed from their rounds, so that speed is exact as well."""
    return [
        replace(outcome, seconds=(outcome.stats.num_rounds + num_prefill_rounds) * seconds_per_round)
        for outcome in outcomes
    ]


def outcome(
    number: int,
    accepted: int,
    rejected: int,
    *,
    domain: str = "red",
    rounds: int | None = None,
    seconds: float = 1.0,
    token_ids: tuple[int, ...] = (0, 1, 2),
) -> RequestOutcome:
    """An outcome with the given counts."""
    num_rounds = rejected if rounds is None else rounds
    counts = DrafterCounts(accepted + rejected, accepted, rejected)
    stats = SpeculationStats(
        num_rounds=num_rounds,
        num_draft_tokens=accepted + rejected,
        num_accepted_tokens=accepted,
        num_rejections=rejected,
        by_drafter={"model": counts},
    )
    return RequestOutcome(f"p{number}", domain, token_ids, stats, seconds)
