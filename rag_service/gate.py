"""The gate: a pair of models is measured, and passes only when the figures leave no doubt.

α must clear the bar in every domain with the lower end of its interval: a rate exactly at the bar measured on
few requests fails for uncertainty (the interval is the wider of resampling's and Student's, since resampling a
handful claims too much). Speculation must be faster than plain decoding, and greedy answers must be
the same (a near-tie of logits that floating-point order may flip is told apart and allowed).
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from generation.attention import Segment
from generation.distillation.prompts import DistillationPrompt, fingerprint
from generation.model_runner import LoadedModel, ModelRunner
from rag_service.gate_record import SLOW_BELOW, Check, GateRecord
from rag_service.measurement import (
    POOLED,
    Pair,
    RequestOutcome,
    Setup,
    acceptance_table,
    by_domain,
    cautious_interval,
    figures,
    interleaved,
    speed_up,
)

Drafters = Literal["model", "served"]
Progress = Callable[[str, int, int], None]
TIE_GAP = 0.125
"""Two logits that differ by less count as tied: one unit in the last place of bfloat16 at a logit of 16."""


@dataclass(frozen=True, slots=True)
class GateRequest:
    """What is gated and how. ``drafters``: lay the bar on the model alone, or on all as served."""

    target: str
    target_fingerprint: str
    draft: str
    draft_fingerprint: str
    min_alpha: float = 0.7
    domains: tuple[str, ...] = ()
    """Domains that must clear the bar; empty: all that occur."""
    drafters: Drafters = "model"
    setup: Setup = field(default_factory=Setup)
    signed_off_by: str = ""
    allow_slow: bool = False
    """Pass a pair whose pooled α is below ``SLOW_BELOW``, however low its bar."""


@dataclass(frozen=True, slots=True)
class Equality:
    """Greedy answers of plain and speculative decoding side by side."""

    num_equal: int
    num_ties: int
    num_different: int


def run_gate(
    pair: Pair, prompts: Sequence[DistillationPrompt], request: GateRequest, progress: Progress | None = None
) -> GateRecord:
    """Measure ``pair`` on ``prompts`` and judge it.

    Four ways at most, in turn on the same prompts: plain and as served at temperature 0 (speed and equality),
    the model alone, and as served at the asked temperature when that is not 0.
    """
    setup = request.setup
    greedy = replace(setup, temperature=0.0)
    ways = {
        "plain decoding": replace(greedy, mode="off"),
        "as served": greedy,
        "draft alone": replace(setup, passages=False),
    }
    if setup.temperature != 0:
        ways["as served, sampled"] = setup
    names = list(ways)

    def report(number: int, done: int) -> None:
        if progress is not None:
            progress(names[number], done, len(prompts))

    plain, served_greedy, model, *sampled = interleaved(
        [(pair, way) for way in ways.values()], prompts, report
    )
    served = sampled[0] if sampled else served_greedy
    outcomes: dict[str, Sequence[RequestOutcome]] = {
        "plain": plain,
        "served_greedy": served_greedy,
        "model": model,
        "served": served,
    }
    return judge(request, outcomes, compare(pair.target, prompts, plain, served_greedy), fingerprint(prompts))


def judge(
    request: GateRequest,
    outcomes: Mapping[str, Sequence[RequestOutcome]],
    equality: Equality,
    data_fingerprint: str,
) -> GateRecord:
    """Turn measurements into a record; every check says in one sentence why it failed."""
    barred = outcomes[request.drafters]
    groups = by_domain(barred)
    names = request.domains or tuple(groups)
    checks = [_alpha_check(name, groups.get(name, []), request.min_alpha) for name in names]
    checks.append(_slow_check(barred, request.allow_slow))
    checks.append(_speed_check(outcomes["plain"], outcomes["served_greedy"]))
    checks.append(_equality_check(equality))
    pooled = figures(barred)
    return GateRecord(
        target=request.target,
        target_fingerprint=request.target_fingerprint,
        draft=request.draft,
        draft_fingerprint=request.draft_fingerprint,
        data_fingerprint=data_fingerprint,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        signed_off_by=request.signed_off_by or getpass.getuser(),
        passed=all(check.passed for check in checks),
        min_alpha=request.min_alpha,
        checks=tuple(checks),
        acceptance_rate=pooled.acceptance_rate,
        drafters=request.drafters,
        temperature=request.setup.temperature,
        figures={
            **{name: acceptance_table(group) for name, group in outcomes.items()},
            "speed_up": _speed_by_domain(outcomes["plain"], outcomes["served_greedy"]),
        },
        setup=asdict(request.setup),
    )


def _alpha_check(domain: str, outcomes: Sequence[RequestOutcome], bar: float) -> Check:
    name = f"alpha/{domain}"
    if not outcomes:
        return Check(name, False, None, None, bar, 0, f"no question of the domain {domain} was asked")
    found = figures(outcomes)
    alpha, interval = found.acceptance_rate, cautious_interval(outcomes)
    if alpha is None:
        reason = f"nothing was proposed in {domain}"
    elif interval is None:
        reason = f"one request in {domain} is too few for an interval"
    elif interval[0] >= bar:
        return Check(name, True, alpha, interval, bar, found.num_requests)
    elif alpha >= bar:
        reason = (
            f"α in {domain} is {alpha:.3f}, but its interval begins at {interval[0]:.3f}, "
            f"below {bar:g}: ask more questions"
        )
    else:
        reason = f"α in {domain} is {alpha:.3f}, below {bar:g}"
    return Check(name, False, alpha, interval, bar, found.num_requests, reason)


def _slow_check(outcomes: Sequence[RequestOutcome], allowed: bool) -> Check:
    """A bar below what the service calls slow is no way around it."""
    found = figures(outcomes)
    alpha = found.acceptance_rate
    slow = alpha is None or alpha < SLOW_BELOW
    reason = ""
    if slow:
        shown = "unknown" if alpha is None else f"{alpha:.3f}"
        reason = (
            f"allowed to be slow: α of all domains together is {shown}"
            if allowed
            else f"α of all domains together is {shown}, below {SLOW_BELOW:g}: only --allow-slow lets that pass"
        )
    return Check(
        "not_slow", allowed or not slow, alpha, found.interval, SLOW_BELOW, found.num_requests, reason
    )


def _speed_by_domain(
    plain: Sequence[RequestOutcome], served: Sequence[RequestOutcome]
) -> dict[str, dict[str, Any]]:
    """Speed-up by domain, for reading: few requests a domain are too noisy to judge by."""
    found = {}
    for domain, group in by_domain(served).items():
        ratio, interval = speed_up(plain, group)
        found[domain] = {"value": ratio, "interval": list(interval) if interval else None}
    return found


def _speed_check(plain: Sequence[RequestOutcome], served: Sequence[RequestOutcome]) -> Check:
    ratio, interval = speed_up(plain, served)
    passed = ratio is not None and ratio > 1.0
    shown = "unknown" if ratio is None else f"{ratio:.2f}"
    reason = "" if passed else f"the speed-up over plain decoding is {shown}"
    return Check("speed_up", passed, ratio, interval, 1.0, len(served), reason)


def _equality_check(equality: Equality) -> Check:
    total = equality.num_equal + equality.num_ties + equality.num_different
    passed = equality.num_different == 0
    reason = "" if passed else f"{equality.num_different} greedy answers differ from plain decoding"
    share = (total - equality.num_different) / total if total else None
    return Check("greedy_equality", passed, share, None, 1.0, total, reason)


def compare(
    target: LoadedModel,
    prompts: Sequence[DistillationPrompt],
    plain: Sequence[RequestOutcome],
    speculative: Sequence[RequestOutcome],
) -> Equality:
    """Count equal, tied and different greedy answers."""
    num_equal = num_ties = num_different = 0
    for prompt, left, right in zip(prompts, plain, speculative, strict=True):
        if left.token_ids == right.token_ids:
            num_equal += 1
        elif is_tie(target, prompt.token_ids, left.token_ids, right.token_ids):
            num_ties += 1
        else:
            num_different += 1
    return Equality(num_equal, num_ties, num_different)


def is_tie(target: LoadedModel, prompt: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two answers part at a token where the target's two logits differ by less than ``TIE_GAP``."""
    shared = next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    if shared >= len(left) or shared >= len(right):
        return False
    ids = [*prompt, *left[:shared]]
    runner = ModelRunner(target, 1, len(ids) + 1)
    slot = runner.pool.allocate()
    if slot is None:
        raise RuntimeError("a fresh pool of one slot has no slot")
    logits = runner.forward([Segment(slot, 0, ids)], [len(ids) - 1])[0]
    rows = [_row(target, token) for token in (left[shared], right[shared])]
    return bool((logits[rows[0]] - logits[rows[1]]).abs() < TIE_GAP)


def _row(target: LoadedModel, token_id: int) -> int:
    if target.id_map is None:
        return token_id
    return int((target.id_map == token_id).nonzero()[0, 0])


def summary(record: GateRecord) -> dict[str, Any]:
    """The record as ``gate --json`` prints it: the record itself, with figures by domain at hand."""
    table = record.figures.get(record.drafters, {})
    return {
        **record.as_dict(),
        POOLED: table.get("pooled"),
        "domains": table.get("domains", {}),
        "speed_up": next((check.value for check in record.checks if check.name == "speed_up"), None),
        "failures": list(record.failures),
    }
