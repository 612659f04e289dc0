"""The nouns of generation, shared by engine, drafters and the wire between replicas.

Everything here is frozen and carries no behaviour beyond derived figures. Counts are ``num_*``, identifiers
``*_ids``, times ``*_seconds``. Mathematics and words follow Leviathan et al. (2211.17192) and vLLM's
speculative-decoding glossary: *draft*, *target*, *proposal*, *round*, *verification*, *accepted*, *recovered*
and *bonus* token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

LastKind = Literal["recovered", "bonus"]
"""Where the last token of a round came from: the residual, or the target after a full acceptance."""

FinishReason = Literal["stop", "length", "cancelled", "error"]
DrafterKind = Literal["model", "passages", "history", "none"]
AcceptanceMethod = Literal["token", "block", "coupled", "threshold", "typical"]
"""``token`` and ``block`` verification, and ``coupled`` (drafter-invariant, for seeded requests) are exact."""

ROUND_CAUSES = (
    "all_accepted",
    "rejected",
    "censored",
    "no_proposal_off",
    "no_proposal_timeout",
    "no_proposal_miss",
    "no_proposal_draft_down",
    "no_proposal_overloaded",
)
"""Why a round ended as it did. ``censored``: cut short by a stop or by the length limit before a rejection."""

EMPTY_CAUSES = ("off", "timeout", "miss", "draft_down", "overloaded")
"""Why a round had no proposal; the round counts under ``no_proposal_<cause>``."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Every field is applied to the target *before* verification.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``logprobs`` is the number
    of alternatives to report (0: only the chosen token's; None: none at all).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    logprobs: int | None = None
    json_schema: str | None = None
    """A JSON schema as text (``"{}"``: any JSON); the answer is constrained to it by a grammar."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate: ids in, chunks out. ``tenant`` and ``domain`` group history and figures."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    domain: str = "other"
    tenant: str = "default"
    passage_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts the answer may copy from and that are not in the prompt already."""
    deadline_seconds: float | None = None
    """Seconds from arrival after which the request is ended with an error."""
    acceptance: AcceptanceMethod | None = None
    """Overrides the engine's acceptance method; ``threshold`` and ``typical`` are lossy and say so."""
    mode: str | None = None
    """Overrides the engine's mode (off, passages, colocated, synchronous, lookahead); None: controller."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one generated token under the target, with alternatives ``(id, logprob)``."""

    token_id: int
    token: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of an answer. The last one has a ``finish_reason`` and carries ``stats`` and ``timings``."""

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: SpeculationStats | None = None
    timings: GenerationTimings | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    error: str | None = None
    num_accepted_tokens: int = 0
    """How many of ``token_ids`` were accepted draft tokens (they come first within each round)."""
    accepted: tuple[bool, ...] = ()
    """For each of ``token_ids``: was it a draft token that the target accepted?"""


@dataclass(frozen=True, slots=True)
class GenerationTimings:
    """Seconds spent in the engine, measured on its monotonic clock."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    time_to_first_token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts of one request's rounds, from which every published figure is computed (speculation.md, 3).

    ``overlap_sum`` sums Σ min(target, draft) over the tested positions, so ``overlap_sum / num_tested`` is β̂.
    Per-position tuples start at the first proposed position. ``by_drafter`` splits drafted, accepted,
    rejections, tested and overlap by drafter kind.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejections: int = 0
    tested_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    acceptance_histogram: tuple[int, ...] = ()
    """``[j]``: rounds *with a proposal* in which exactly j tokens were accepted."""
    rounds_by_cause: Mapping[str, int] = field(default_factory=dict)
    overlap_sum: float = 0.0
    num_overlap: int = 0
    """Positions behind ``overlap_sum``."""
    by_drafter: Mapping[str, DrafterCounts] = field(default_factory=dict)
    lookahead_hits: int = 0
    lookahead_misses: int = 0
    hidden_draft_seconds: float = 0.0
    """Draft time that overlapped a verification and so cost the request nothing."""
    waited_draft_seconds: float = 0.0
    """Draft time that the request waited for."""
    acceptance_method: AcceptanceMethod = "token"

    @property
    def drafter(self) -> str:
        """The kinds that proposed anything, joined by ``+``; ``none`` without a proposal."""
        return "+".join(sorted(self.by_drafter)) or "none"

    @property
    def lossy(self) -> bool:
        return self.acceptance_method in ("threshold", "typical")

    @property
    def acceptance_rate(self) -> float | None:
        """α̂: ``A / (A + R)`` token-wise; β̂ under block verification; None when nothing was tested.

        Under a lossy rule the figure is the rule's acceptance and is labelled so by whoever shows it.
        """
        if self.acceptance_method == "block":
            return self.overlap_sum / self.num_overlap if self.num_overlap else None
        tested = self.num_accepted_tokens + self.num_rejections
        return self.num_accepted_tokens / tested if tested else None

    @property
    def accepted_over_drafted(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """τ̂ = 1 + A / rounds: tokens a round."""
        return 1.0 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """The part of a request's counts that one drafter kind earned."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejections: int = 0
    overlap_sum: float = 0.0
    num_overlap: int = 0


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Up to k draft tokens of one sequence, with the distributions they were *sampled from*.

    ``support_ids`` and ``support_probs`` are ``[k, m]``: the draft restricted itself to these m tokens,
    renormalised, sampled from that, and ships exactly that (the rule of the wire). Both None: a point mass
    at every position (passages, history, greedy draft).
    """

    token_ids: tuple[int, ...] = ()
    support_ids: IntArray | None = None
    support_probs: FloatArray | None = None
    kinds: tuple[DrafterKind, ...] = ()
    """Which drafter proposed each token; empty means ``model`` throughout."""
    empty_cause: str | None = None
    """Why there is nothing, one of ``EMPTY_CAUSES``; only for an empty proposal."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def kind_at(self, position: int) -> DrafterKind:
        return self.kinds[position] if self.kinds else "model"

    def first(self, k: int) -> DraftProposal:
        """The first ``k`` tokens of the proposal."""
        if len(self) <= k:
            return self
        ids, probs = self.support_ids, self.support_probs
        return DraftProposal(
            self.token_ids[:k],
            ids[:k] if ids is not None else None,
            probs[:k] if probs is not None else None,
            self.kinds[:k],
        )


NO_PROPOSAL = DraftProposal(empty_cause="off")


@dataclass(frozen=True, slots=True)
class Verification:
    """What the target made of a proposal: the accepted prefix and one token more.

    ``token_ids`` has ``num_accepted + 1`` entries. ``overlap[i]`` is Σ min(target, draft) at tested position i
    (target probability of the token for a point mass); its length is the number of positions tested.
    """

    num_accepted: int
    token_ids: tuple[int, ...]
    last_kind: LastKind
    overlap: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Ask the draft for round ``round_id + 1`` of one sequence, while the target verifies ``round_id``.

    ``new_token_ids`` extend what the draft already holds up to ``confirmed_length`` tokens (prompt included):
    the draft's truth is ``confirmed_length - len(new_token_ids)`` tokens it has, then these. ``proposal`` is
    the one under verification; its outcomes are enumerated into a table of at most ``branch_budget`` branches
    of ``num_draft_tokens`` each; an empty proposal under verification has the outcomes (0, t). ``branch_budget``
    0 asks for a proposal right now instead: the table then has the one branch ``NOW``. Messages are idempotent
    by (request_id, round_id, confirmed_length).
    """

    request_id: str
    round_id: int
    confirmed_length: int
    new_token_ids: tuple[int, ...]
    num_draft_tokens: int
    branch_budget: int
    sampling: SamplingParams
    proposal: DraftProposal = NO_PROPOSAL
    fanout: tuple[int, ...] = ()
    """Branches to open after each k accepted tokens; empty: the draft spreads ``branch_budget`` itself."""
    min_reach: float = 0.0
    """A proposal ends after the token at which the chance that all of it is accepted falls below this. What
    comes after a token may depend on it, whether it comes itself may not: so this changes no distribution."""


Outcome = tuple[int, int]
"""(tokens accepted, next token id): what a verification can end in."""

NOW: Outcome = (0, -1)
"""The branch of a synchronous reply: no outcome is awaited."""


@dataclass(frozen=True, slots=True)
class LookaheadTable:
    """Prepared proposals by outcome of the round under verification."""

    request_id: str
    round_id: int
    confirmed_length: int
    branches: Mapping[Outcome, DraftProposal]
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixMissing:
    """The draft lacks this sequence's prefix: send the ids from ``have_length`` on again."""

    request_id: str
    round_id: int
    have_length: int


@dataclass(frozen=True, slots=True)
class DraftRefusal:
    """The draft has no proposal for this round: ``cause`` is one of ``EMPTY_CAUSES``."""

    request_id: str
    round_id: int
    cause: str


DraftReply = LookaheadTable | PrefixMissing | DraftRefusal


class GenerationError(Exception):
    """A request the engine refuses or ends; ``code`` is machine-readable, ``str()`` is one clear sentence."""

    def __init__(self, message: str, code: str = "generation_failed") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Callable[..., GenerationError], tuple[type[GenerationError], str, str]]:
        # Subclasses take other arguments than their message, which pickle's default would hand them back.
        return _rebuilt_error, (type(self), str(self), self.code)


def _rebuilt_error(kind: type[GenerationError], message: str, code: str) -> GenerationError:
    error = kind.__new__(kind, message)
    GenerationError.__init__(error, message, code)
    return error


class PromptTooLong(GenerationError):
    """The prompt does not fit; both lengths are named."""

    def __init__(self, prompt_length: int, context_length: int) -> None:
        super().__init__(
            f"The prompt has {prompt_length} tokens; the context holds {context_length} including the answer.",
            "context_length_exceeded",
        )


class QueueFull(GenerationError):
    """The bounded waiting queue is full: try again later."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already; try again later.", "overloaded")


def join_ids(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Concatenate id sequences."""
    return tuple(token_id for part in parts for token_id in part)
