"""Tries ways of speculating on one's own questions and recommends the fastest by the clock.

Beside each measured speed-up stands the one that speculation.md, section 4, predicts from measured costs: where
the two part, the costs changed during the run or the acceptance is not what the formula assumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import Any

from generation.attention import Segment
from generation.config import Mode
from generation.distillation.prompts import DistillationPrompt
from generation.model_runner import LoadedModel, ModelRunner
from generation.types import AcceptanceMethod
from rag_service.measurement import (
    AcceptanceFigures,
    Pair,
    RequestOutcome,
    Setup,
    figures,
    interleaved,
    speed_up,
)
from rag_service.statistics import Interval, percentiles

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values to combine. ``drafts``: names of the candidate drafts given to ``sweep``."""

    modes: tuple[Mode, ...] = ("passages", "colocated", "lookahead")
    num_draft_tokens: tuple[int, ...] = (2, 3, 4, 5)
    branch_budgets: tuple[int, ...] = (8,)
    temperatures: tuple[float, ...] = (0.0,)
    acceptances: tuple[AcceptanceMethod, ...] = ("token",)
    passages: tuple[bool, ...] = (True,)
    max_tokens: int = 64

    def setups(self) -> list[Setup]:
        """Every combination that differs from the others in what it does."""
        found: dict[Setup, None] = {}
        for mode, k, budget, temperature, acceptance, passages in product(
            self.modes, self.num_draft_tokens, self.branch_budgets, self.temperatures, self.acceptances,
            self.passages,
        ):  # fmt: skip
            # A branch budget means something to look-ahead alone; without a model passages are all there is.
            relevant = budget if mode == "lookahead" else self.branch_budgets[0]
            copies = True if mode == "passages" else passages
            found[Setup(mode, k, temperature, copies, acceptance, relevant, self.max_tokens)] = None
        return list(found)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, medians: one target pass of width w after ``context`` tokens, one draft step."""

    verify_seconds: Mapping[int, float]
    draft_seconds: float | None
    context: int

    def verify(self, width: int) -> float:
        """Seconds of a pass of ``width``; the nearest wider measured one where it was not measured."""
        wider = [known for known in sorted(self.verify_seconds) if known >= width]
        return self.verify_seconds[wider[0] if wider else max(self.verify_seconds)]


@dataclass(frozen=True, slots=True)
class TuningResult:
    """One way of speculating as measured."""

    draft: str
    setup: Setup
    figures: AcceptanceFigures
    speed_up: float | None
    speed_up_interval: Interval | None
    predicted: float | None
    p95_seconds: float | None

    @property
    def lossy(self) -> bool:
        return self.setup.acceptance in ("threshold", "typical")

    def as_dict(self) -> dict[str, Any]:
        return {
            "draft": self.draft,
            **asdict(self.setup),
            **self.figures.as_dict(),
            "speed_up": self.speed_up,
            "speed_up_interval": list(self.speed_up_interval) if self.speed_up_interval else None,
            "predicted_speed_up": self.predicted,
            "p95_seconds": self.p95_seconds,
            "lossy": self.lossy,
        }


def sweep(
    pairs: Mapping[str, Pair],
    prompts: Sequence[DistillationPrompt],
    plan: Sweep,
    progress: Progress | None = None,
) -> tuple[list[TuningResult], dict[str, Costs]]:
    """Measure every setup with every candidate draft (``pairs`` by draft name, one target).

    Plain decoding is measured once a temperature, and its requests are compared with one by one. All setups
    take turns on the same questions, so that a change of load meets all of them.
    """
    setups = plan.setups()
    results: list[TuningResult] = []
    first = next(iter(pairs.values()))
    context = int(median(len(prompt.token_ids) for prompt in prompts))
    costs = {name: measure_costs(pair, context, max(plan.num_draft_tokens)) for name, pair in pairs.items()}
    jobs = list(_jobs(pairs, setups))
    plain_setups = [Setup("off", 1, one, max_tokens=plan.max_tokens) for one in plan.temperatures]
    runs = [(first, setup) for setup in plain_setups] + [(pairs[name], setup) for name, setup in jobs]

    def report(number: int, done: int) -> None:
        if progress is not None and number == len(runs) - 1:
            progress("questions", done, len(prompts))

    measured = interleaved(runs, prompts, report)
    plain = dict(zip(plan.temperatures, measured, strict=False))
    for (name, setup), outcomes in zip(jobs, measured[len(plain_setups) :], strict=True):
        results.append(_result(name, setup, outcomes, plain[setup.temperature], costs[name]))
    for temperature, outcomes in plain.items():
        off = Setup("off", 1, temperature, max_tokens=plan.max_tokens)
        results.append(_result("", off, outcomes, outcomes, costs[next(iter(pairs))]))
    return results, costs


def _jobs(pairs: Mapping[str, Pair], setups: Iterable[Setup]) -> Iterable[tuple[str, Setup]]:
    names = list(pairs)
    for setup in setups:
        for name in names[:1] if setup.mode == "passages" else names:
            if setup.mode == "passages" or pairs[name].draft is not None:
                yield name, setup


def _result(
    draft: str,
    setup: Setup,
    outcomes: Sequence[RequestOutcome],
    plain: Sequence[RequestOutcome],
    costs: Costs,
) -> TuningResult:
    found = figures(outcomes)
    ratio, interval = (1.0, None) if setup.mode == "off" else speed_up(plain, outcomes)
    return TuningResult(
        draft="" if setup.mode in ("off", "passages") else draft,
        setup=setup,
        figures=found,
        speed_up=ratio,
        speed_up_interval=interval,
        predicted=predicted_speed_up(setup, found, costs),
        p95_seconds=percentiles([outcome.seconds for outcome in outcomes])["p95"],
    )


def predicted_speed_up(setup: Setup, found: AcceptanceFigures, costs: Costs) -> float | None:
    """Speed-up by the measured τ̂ and costs; None where nothing was measured to predict from.

    Same device: τ/(c·K + v). Look-ahead with every table a hit: τ/max(v, table); the misses make it less.
    """
    if setup.mode == "off":
        return 1.0
    length = found.mean_acceptance_length
    if length is None:
        return None
    one, wide = costs.verify(1), costs.verify(setup.num_draft_tokens + 1)
    if setup.mode == "passages":
        return length * one / wide
    if costs.draft_seconds is None:
        return None
    drafting = costs.draft_seconds * setup.num_draft_tokens
    if setup.mode == "lookahead":
        return length * one / max(wide, drafting)
    return length * one / (wide + drafting)


def measure_costs(pair: Pair, context: int, max_draft_tokens: int, repeats: int = 7) -> Costs:
    """Time target passes of width 1 to ``max_draft_tokens + 1`` and one draft step after ``context`` tokens."""
    widths = range(1, max_draft_tokens + 2)
    target = _pass_seconds(pair.target, context, widths, repeats)
    draft = None if pair.draft is None else _pass_seconds(pair.draft, context, (1,), repeats)[1]
    return Costs(target, draft, context)


def _pass_seconds(model: LoadedModel, context: int, widths: Iterable[int], repeats: int) -> dict[int, float]:
    widths = list(widths)
    context = max(1, min(context, model.context_length - max(widths)))
    runner = ModelRunner(model, 1, context + max(widths))
    slot = runner.pool.allocate()
    if slot is None:
        raise RuntimeError("a fresh pool of one slot has no slot")
    runner.forward([Segment(slot, 0, [0] * context)], [context - 1])
    seconds = {}
    for width in widths:
        segment = Segment(slot, context, [0] * width)
        samples = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            runner.forward([segment], range(width))
            samples.append(time.perf_counter() - began)
        seconds[width] = median(samples[1:])
    return seconds


def recommend(results: Sequence[TuningResult], temperature: float | None = None) -> TuningResult:
    """The fastest lossless setup by the clock: tokens a second over all questions.

    ``temperature`` None compares at the first measured temperature. Plain decoding is among the candidates.
    """
    if temperature is None:
        temperature = results[0].setup.temperature
    candidates = [
        result
        for result in results
        if result.setup.temperature == temperature and not result.lossy and result.speed_up is not None
    ]
    return max(candidates, key=lambda result: result.speed_up or 0.0)


def as_configuration(best: TuningResult, draft_model: str | None) -> dict[str, Any]:
    """The recommended setup as sections of the configuration file."""
    speculation = {
        "mode": best.setup.mode,
        "num_draft_tokens": best.setup.num_draft_tokens,
        "passages": best.setup.passages and best.setup.mode != "off",
        "acceptance": best.setup.acceptance,
        "branch_budget": best.setup.branch_budget,
    }
    values: dict[str, Any] = {"engine": {"speculation": speculation}}
    if best.draft and draft_model:
        values["draft"] = {"draft": {"model": draft_model}}
    return values
