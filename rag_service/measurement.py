"""Runs prompts through the engine in this process and keeps what each request's rounds came to.

This is the service's own decoding loop and verifier, without HTTP and Ray: what ``draft evaluate``, ``gate``
and ``tune`` measure is what the service does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from generation.config import EngineConfig, Mode, SpeculationConfig
from generation.distillation.prompts import DistillationPrompt
from generation.drafters.link import DraftLink, LocalLink, ThreadLink
from generation.drafters.model import DraftWorker
from generation.engine import Engine
from generation.model_runner import LoadedModel
from generation.types import AcceptanceMethod, GenerationRequest, SamplingParams, SpeculationStats
from rag_service.statistics import (
    Interval,
    cautious_ratio_interval,
    mean_of_ratios,
    pooled_ratio,
    ratio_interval,
)

POOLED = "all"
"""The name under which all domains together are reported."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One way of decoding. ``mode`` ``off`` is plain decoding; ``passages`` copies without the model."""

    mode: Mode = "colocated"
    num_draft_tokens: int = 5
    temperature: float = 0.0
    passages: bool = True
    acceptance: AcceptanceMethod = "token"
    branch_budget: int = 8
    max_tokens: int = 96
    seed: int = 0
    batch_size: int = 1

    @property
    def drafters(self) -> str:
        """Which drafters may propose, in words."""
        if self.mode == "off":
            return "none"
        if self.mode == "passages":
            return "passages"
        return "model+passages" if self.passages else "model"


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request's answer and counts; ``seconds`` is decoding time, prefill excluded."""

    prompt_id: str
    domain: str
    token_ids: tuple[int, ...]
    stats: SpeculationStats
    seconds: float


@dataclass(frozen=True, slots=True)
class AcceptanceFigures:
    """Published figures of a set of requests; None where nothing stands behind one.

    ``acceptance_rate`` is A/(A+R) pooled over requests (β̂ under block verification), with the 95 % interval
    that resamples requests; ``mean_acceptance_length`` is τ̂ in tokens a round.
    """

    acceptance_rate: float | None
    interval: Interval | None
    mean_of_requests: float | None
    overlap: float | None
    accepted_over_drafted: float | None
    mean_acceptance_length: float | None
    num_requests: int
    num_rounds: int
    num_tokens: int
    tokens_per_second: float | None

    def as_dict(self) -> dict[str, Any]:
        """The JSON keys of design.md, section 6."""
        return {
            "acceptance_rate": self.acceptance_rate,
            "interval": list(self.interval) if self.interval else None,
            "acceptance_rate_mean_of_requests": self.mean_of_requests,
            "overlap": self.overlap,
            "accepted_over_drafted": self.accepted_over_drafted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "num_requests": self.num_requests,
            "num_rounds": self.num_rounds,
            "num_generated_tokens": self.num_tokens,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(slots=True)
class Pair:
    """A target with its tokenizer and, perhaps, a draft: all that a measurement needs."""

    target: LoadedModel
    tokenizer: Any
    draft: LoadedModel | None = None
    engine_config: EngineConfig = field(default_factory=EngineConfig)

    def run(
        self,
        prompts: Sequence[DistillationPrompt],
        setup: Setup,
        on_done: Callable[[int], None] | None = None,
    ) -> list[RequestOutcome]:
        """Answer every prompt, ``batch_size`` at a time; outcomes in the prompts' order.

        Raises ``GenerationError`` when a prompt is refused: a figure with silent gaps would be wrong.
        """
        engine, link = self._engine(prompts, setup)
        outcomes: list[RequestOutcome] = []
        try:
            for start in range(0, len(prompts), setup.batch_size):
                outcomes += _answer(engine, prompts[start : start + setup.batch_size], setup)
                if on_done is not None:
                    on_done(len(outcomes))
        finally:
            if isinstance(link, ThreadLink):
                link.close()
        return outcomes

    def _engine(
        self, prompts: Sequence[DistillationPrompt], setup: Setup
    ) -> tuple[Engine, LocalLink | ThreadLink | None]:
        longest = max(len(prompt.token_ids) for prompt in prompts) + setup.max_tokens + 16
        length = min(self.target.context_length, longest)
        cache = self.engine_config.cache.model_copy(update={"num_tokens": max(64, length * setup.batch_size)})
        speculation: SpeculationConfig = self.engine_config.speculation.model_copy(
            update={
                "mode": setup.mode,
                "num_draft_tokens": setup.num_draft_tokens,
                "passages": setup.passages,
                "acceptance": setup.acceptance,
                "branch_budget": setup.branch_budget,
                "history": False,
            }
        )
        config = self.engine_config.model_copy(
            update={
                "cache": cache,
                "speculation": speculation,
                "max_batch_size": setup.batch_size,
                "max_waiting": setup.batch_size,
                "context_length": length,
            }
        )
        link = self._link(setup, length)
        links: dict[str, DraftLink] = {}
        if link is not None:
            links["remote" if link.is_remote else "colocated"] = link
        return Engine(self.target, self.tokenizer, config, **links), link

    def _link(self, setup: Setup, length: int) -> LocalLink | ThreadLink | None:
        if self.draft is None or setup.mode in ("off", "passages"):
            return None
        scratch = setup.branch_budget * setup.num_draft_tokens + 64
        worker = DraftWorker(
            self.draft,
            num_slots=setup.batch_size,
            slot_length=length + scratch,
            support_size=self.engine_config.speculation.support_size,
        )
        return ThreadLink(worker) if setup.mode in ("lookahead", "synchronous") else LocalLink(worker)


def _answer(engine: Engine, prompts: Sequence[DistillationPrompt], setup: Setup) -> list[RequestOutcome]:
    # No seed: that would switch to the coupled rule. Draws follow the request's id, so runs repeat all the same.
    sampling = SamplingParams(temperature=setup.temperature, max_tokens=setup.max_tokens)
    requests = [
        GenerationRequest(
            f"{setup.seed}/{number}/{prompt.id}", prompt.token_ids, sampling, domain=prompt.domain
        )
        for number, prompt in enumerate(prompts)
    ]
    ids: dict[str, list[int]] = defaultdict(list)
    outcomes: dict[str, RequestOutcome] = {}
    by_request = {request.request_id: prompt for request, prompt in zip(requests, prompts, strict=True)}
    for chunk in engine.generate(requests):
        ids[chunk.request_id].extend(chunk.token_ids)
        if chunk.error is not None:
            raise _failed(by_request[chunk.request_id].id, chunk.error)
        if chunk.finish_reason is not None and chunk.stats is not None and chunk.timings is not None:
            prompt = by_request[chunk.request_id]
            outcomes[chunk.request_id] = RequestOutcome(
                prompt.id,
                prompt.domain,
                tuple(ids[chunk.request_id]),
                chunk.stats,
                chunk.timings.decode_seconds,
            )
    return [outcomes[request.request_id] for request in requests]


def _failed(prompt_id: str, error: str) -> Exception:
    from generation.types import GenerationError

    return GenerationError(f"The question {prompt_id} could not be answered: {error}")


def figures(outcomes: Sequence[RequestOutcome]) -> AcceptanceFigures:
    """Figures over the given requests, pooled."""
    stats = [outcome.stats for outcome in outcomes]
    above, below = ratio_parts(stats)
    num_rounds = sum(one.num_rounds for one in stats)
    num_accepted = sum(one.num_accepted_tokens for one in stats)
    seconds = sum(outcome.seconds for outcome in outcomes)
    num_tokens = sum(len(outcome.token_ids) for outcome in outcomes)
    return AcceptanceFigures(
        acceptance_rate=pooled_ratio(above, below),
        interval=ratio_interval(above, below),
        mean_of_requests=mean_of_ratios(above, below),
        overlap=pooled_ratio([one.overlap_sum for one in stats], [one.num_overlap for one in stats]),
        accepted_over_drafted=pooled_ratio(
            [one.num_accepted_tokens for one in stats], [one.num_draft_tokens for one in stats]
        ),
        mean_acceptance_length=1.0 + num_accepted / num_rounds if num_rounds else None,
        num_requests=len(stats),
        num_rounds=num_rounds,
        num_tokens=num_tokens,
        tokens_per_second=num_tokens / seconds if seconds > 0 else None,
    )


def cautious_interval(outcomes: Sequence[RequestOutcome]) -> Interval | None:
    """The interval of the acceptance rate that holds on few requests too: what a decision stands on."""
    return cautious_ratio_interval(*ratio_parts([outcome.stats for outcome in outcomes]))


def ratio_parts(stats: Sequence[SpeculationStats]) -> tuple[list[float], list[float]]:
    """What was accepted of each request and what was tested; overlaps once a block is among them, whose positions
    are not tested one by one."""
    if any(one.acceptance_method == "block" for one in stats):
        return [one.overlap_sum for one in stats], [float(one.num_overlap) for one in stats]
    accepted = [float(one.num_accepted_tokens) for one in stats]
    return accepted, [a + one.num_rejections for a, one in zip(accepted, stats, strict=True)]


def by_domain(outcomes: Iterable[RequestOutcome]) -> dict[str, list[RequestOutcome]]:
    """Outcomes grouped by domain, in order of first appearance."""
    groups: dict[str, list[RequestOutcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.domain].append(outcome)
    return dict(groups)


def acceptance_table(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """``{"pooled": figures, "domains": {domain: figures}}`` as plain values."""
    return {
        "pooled": figures(outcomes).as_dict(),
        "domains": {domain: figures(group).as_dict() for domain, group in by_domain(outcomes).items()},
    }


def speed_up(
    plain: Sequence[RequestOutcome], speculative: Sequence[RequestOutcome]
) -> tuple[float | None, Interval | None]:
    """Plain decoding seconds over speculative ones for the same tokens, with its interval over requests.

    Times are compared a token at a time, so that answers that differ in length (sampling) don't count.
    """
    theirs: Mapping[str, RequestOutcome] = {outcome.prompt_id: outcome for outcome in plain}
    above, below = [], []
    for outcome in speculative:
        other = theirs.get(outcome.prompt_id)
        if other is None or not outcome.token_ids or not other.token_ids or outcome.seconds <= 0:
            continue
        above.append(other.seconds / len(other.token_ids) * len(outcome.token_ids))
        below.append(outcome.seconds)
    return pooled_ratio(above, below), ratio_interval(above, below)


def interleaved(
    runs: Sequence[tuple[Pair, Setup]],
    prompts: Sequence[DistillationPrompt],
    on_done: Callable[[int, int], None] | None = None,
    block: int = 2,
) -> list[list[RequestOutcome]]:
    """Several setups over the same prompts, a few prompts at a time in turn; one list of outcomes a setup.

    One setup after the other would compare the machine's load then with its load now. ``on_done`` is given
    the run's number and how many prompts it has answered.
    """
    outcomes: list[list[RequestOutcome]] = [[] for _ in runs]
    for start in range(0, len(prompts), block):
        for number, (pair, setup) in enumerate(runs):
            outcomes[number] += pair.run(prompts[start : start + block], setup)
            if on_done is not None:
                on_done(number, len(outcomes[number]))
    return outcomes
