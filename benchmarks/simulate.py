"""The real scheduler, proposer, controller and protocol under a simulated clock.

Only the two models are replaced: the target says a fixed text and the draft agrees with it by chance α at every
position, as independent draws; each takes as long as it is told to. So the design can be judged for hardware
that is not at hand: a 70B target with a 1.5B draft, an 8B target with a 1B draft, round trips of 0.05 to 5 ms,
batches of 1 to 64. Beside each simulated speed-up stands the theory's line (speculation.md, section 4).

The simulation knows no tokens/s of a real GPU: step times are parameters, given with their reasons below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from harness import parser, publish, say

from generation.acceptance import verify_greedy
from generation.config import SpeculationConfig
from generation.drafters.link import Key
from generation.drafters.proposer import Proposer
from generation.lookahead import fan_out
from generation.scheduler import Scheduler
from generation.sequence import Sequence
from generation.types import (
    NO_PROPOSAL,
    NOW,
    DraftProposal,
    DraftReply,
    DraftRequest,
    GenerationRequest,
    LookaheadTable,
    SamplingParams,
    Verification,
)
from generation.verifier import Verdict

VOCABULARY = 1 << 16
PROMPT_LENGTH = 16
ANSWER_LENGTH = 192


@dataclass(frozen=True, slots=True)
class Hardware:
    """Step times in milliseconds: base + slope · rows, for the target and the draft.

    A decode step is bound by reading weights: bytes / bandwidth. 70B in 8 bits on two H100 (3.35 TB/s each,
    about 70 % reached) reads 70 GB in about 15 ms; 1.5B in 16 bits on one reads 3 GB in 1.3 ms; 8B in 16 bits
    7 ms; 1B in 16 bits 0.9 ms. Rows cost little until a pass is bound by arithmetic (some hundred rows).
    """

    name: str
    target_base: float
    target_row: float
    draft_base: float
    draft_row: float

    def verification(self, rows: int) -> float:
        return (self.target_base + self.target_row * rows) / 1e3

    def draft_step(self, rows: int) -> float:
        return (self.draft_base + self.draft_row * rows) / 1e3


HARDWARE = (
    Hardware("70B + 1.5B on H100", 15.0, 0.035, 1.3, 0.004),
    Hardware("8B + 1B on H100", 7.0, 0.015, 0.9, 0.003),
)


def chance(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def true_token(request_id: str, position: int) -> int:
    """What the target says at a position."""
    return int(chance(request_id, position) * (VOCABULARY - 2))


class SimulatedClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedDraft:
    """A ``DraftLink`` whose replies arrive when the draft and the network have had their time."""

    is_open = True

    def __init__(
        self, hardware: Hardware, clock: SimulatedClock, alpha: float, round_trip: float, *, remote: bool
    ) -> None:
        self.is_remote = remote
        self._hardware, self._clock = hardware, clock
        self._alpha, self._round_trip = alpha, round_trip
        self._free_at = 0.0
        self._due: dict[Key, tuple[float, DraftReply]] = {}

    def send(self, requests: Seq[DraftRequest]) -> None:
        arrives = self._clock.now + self._round_trip / 2
        begins = max(arrives, self._free_at)
        branches = sum(max(1, request.branch_budget) for request in requests)
        depth = max(request.num_draft_tokens for request in requests)
        first = self._hardware.draft_step(sum(1 + len(request.proposal) for request in requests))
        seconds = first + (depth - 1) * self._hardware.draft_step(branches)
        if any(request.branch_budget for request in requests):
            seconds += self._hardware.draft_step(branches)
        self._free_at = begins + seconds
        for request in requests:
            due = self._free_at + self._round_trip / 2
            self._due[request.request_id, request.round_id] = (due, self._table(request, seconds))

    def receive(self, keys: Seq[Key], timeout_seconds: float) -> dict[str, DraftReply]:
        deadline = self._clock.now + timeout_seconds
        taken = {
            key: self._due.pop(key) for key in keys if key in self._due and self._due[key][0] <= deadline
        }
        complete = len(taken) == len(keys)
        waited = max((due for due, _ in taken.values()), default=self._clock.now) if complete else deadline
        self._clock.now = max(self._clock.now, waited)
        return {key[0]: reply for key, (_, reply) in taken.items()}

    def forget(self, request_ids: Seq[str]) -> None:
        gone = set(request_ids)
        self._due = {key: value for key, value in self._due.items() if key[0] not in gone}

    def _table(self, request: DraftRequest, seconds: float) -> LookaheadTable:
        if request.branch_budget == 0:
            branches = {NOW: self._proposal(request, request.confirmed_length)}
        else:
            branches = {}
            counts = request.fanout or fan_out(len(request.proposal), request.branch_budget, self._alpha)
            for k, count in enumerate(counts[: len(request.proposal) + 1]):
                token = self._covered(request, k, count)
                if token is not None:
                    start = request.confirmed_length + k + 1
                    branches[k, token] = self._proposal(request, start)
        return LookaheadTable(
            request.request_id, request.round_id, request.confirmed_length, branches, seconds
        )

    def _covered(self, request: DraftRequest, k: int, count: int) -> int | None:
        """The true next token, if the draft's ``count`` likeliest contain it: misses fall like 1/F."""
        if count == 0:
            return None
        position = request.confirmed_length + k
        miss = (1.0 - self._alpha) if k == len(request.proposal) else 1.0 - self._alpha / 2
        inside = chance("cover", request.request_id, position, k) >= miss / count
        return true_token(request.request_id, position) if inside else None

    def _proposal(self, request: DraftRequest, start: int) -> DraftProposal:
        ids = []
        for position in range(start, start + request.num_draft_tokens):
            agrees = chance("agree", request.request_id, position) < self._alpha
            ids.append(true_token(request.request_id, position) if agrees else VOCABULARY - 1)
        return DraftProposal(tuple(ids))


class _Slots:
    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    def allocate(self) -> int | None:
        return self._free.pop() if self._free else None

    def free(self, slot: int, *, poisoned: bool | None = False) -> None:
        self._free.append(slot)


class _NoText:
    def decode(self, token_ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        return ""


def simulate(
    hardware: Hardware, mode: str, alpha: float, round_trip: float, batch: int, k: int
) -> dict[str, Any]:
    """Tokens per simulated second of one mode, with the real scheduler and proposer."""
    clock = SimulatedClock()
    local = mode == "colocated"
    link = SimulatedDraft(hardware, clock, alpha, 0.0 if local else round_trip, remote=not local)
    options: dict[str, Any] = {"mode": mode, "num_draft_tokens": k, "passages": False, "branch_budget": 16}
    # The simulated draft knows no doubt: its proposals are as long as they are asked for.
    config = SpeculationConfig(adaptive_length=False, **options)
    proposer = Proposer(
        config, colocated=link if local else None, remote=None if local else link, clock=clock
    )

    def admitted(sequence: Sequence) -> int:
        proposer.start(sequence)
        return 0

    scheduler = Scheduler(
        _Slots(batch),
        max_batch_size=batch,
        max_waiting=4 * batch,
        prefill_chunk_tokens=1 << 20,
        context_length=1 << 20,
        on_admit=admitted,
        on_finish=proposer.finish,
        clock=clock,
    )
    sampling = SamplingParams(max_tokens=ANSWER_LENGTH)
    for number in range(2 * batch):
        request = GenerationRequest(f"{mode}/{number}", tuple(range(PROMPT_LENGTH)), sampling)
        scheduler.add(Sequence(request, _NoText(), clock=clock))
    num_tokens, step_seconds, began = 0, hardware.verification(batch), clock.now
    while scheduler.running or scheduler.waiting:
        plan, _ = scheduler.schedule()
        starting = [sequence for sequence, _ in plan.prefills]
        proposer.decide([*plan.decoding, *starting])
        proposals = proposer.propose(plan.decoding, step_seconds)
        proposer.prepare([*plan.decoding, *starting], [*proposals, *[NO_PROPOSAL] * len(starting)])
        rows = sum(len(proposal) + 1 for proposal in proposals)
        seconds = hardware.verification(max(1, rows))
        clock.now += seconds
        if plan.decoding and not plan.prefills:
            step_seconds += 0.1 * (seconds - step_seconds)
            proposer.controller.verification.update(rows, seconds)
            proposer.observe_verification(seconds)
        for sequence, count in plan.prefills:
            scheduler.prefilled(sequence, count)
        num_tokens += _commit(scheduler, proposer, plan.decoding, proposals, rounds=True)
        num_tokens += _commit(scheduler, proposer, starting, [NO_PROPOSAL] * len(starting), rounds=False)
    hits, misses = proposer.lookahead_hits, proposer.lookahead_misses
    return {
        "rate": num_tokens / (clock.now - began),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
    }


def _commit(
    scheduler: Scheduler,
    proposer: Proposer,
    sequences: list[Sequence],
    proposals: Seq[DraftProposal],
    *,
    rounds: bool,
) -> int:
    verdicts = []
    for sequence, proposal in zip(sequences, proposals, strict=True):
        start = len(sequence.token_ids)
        truth = [true_token(sequence.request_id, start + i) for i in range(len(proposal) + 1)]
        verification: Verification = verify_greedy(truth, proposal)
        verdicts.append(Verdict(proposal, verification))
    before = sum(sequence.num_generated for sequence in sequences)
    scheduler.commit(sequences, verdicts, rounds=rounds)
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        if not sequence.is_finished and verdict.verification is not None:
            proposer.committed(sequence, verdict.proposal, verdict.verification, ended=False)
    return sum(sequence.num_generated for sequence in sequences) - before


def theory(
    hardware: Hardware, mode: str, alpha: float, round_trip: float, k: int, hit_rate: float | None
) -> float:
    """Speed-up at batch 1 by speculation.md, section 4, with the simulated hit rate for look-ahead."""
    t1, tv = hardware.verification(1), hardware.verification(k + 1)
    c, v, r = hardware.draft_step(1) / t1, tv / t1, round_trip / t1
    tokens = 1.0 + sum(alpha**i for i in range(1, k + 1))
    if mode == "colocated":
        return tokens / (c * k + v)
    if mode == "synchronous":
        return tokens / (c * k + v + r)
    h = hit_rate or 0.0
    # On a miss this service takes a plain step: one token for one step, instead of waiting for the draft.
    table = (k + 1) * hardware.draft_step(16) / t1
    return (h * tokens + (1 - h)) / (h * max(v, table + r) + (1 - h) * max(1.0, table + r))


def settings(quick: bool) -> list[tuple[float, int, float]]:
    """(α, sequences at once, round trip in ms): every α with every round trip for one sequence, where the theory
    speaks; every batch at three α with the nearest and the farthest draft."""
    alphas = (0.5, 0.7, 0.9) if quick else (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    trips = (0.05, 1.0) if quick else (0.05, 0.5, 1.0, 2.0, 5.0)
    batches = (8,) if quick else (2, 4, 8, 16, 32, 64)
    alone = [(alpha, 1, trip) for alpha in alphas for trip in trips]
    return alone + [
        (alpha, n, trip) for alpha in (0.5, 0.7, 0.9) for n in batches for trip in (trips[0], trips[-1])
    ]


def measured(hardware: Hardware, alpha: float, batch: int, trip: float) -> dict[str, Any]:
    """Speed of every mode over plain decoding, with the theory's beside it for one sequence."""
    k = 8 if alpha >= 0.8 else 5 if alpha >= 0.6 else 3
    off = simulate(hardware, "off", alpha, 0.0, batch, k)["rate"]
    row: dict[str, Any] = {
        "hardware": hardware.name,
        "alpha": alpha,
        "k": k,
        "batch": batch,
        "round_trip_ms": trip,
    }
    for mode in ("colocated", "synchronous", "lookahead", "auto"):
        found = simulate(hardware, mode, alpha, trip / 1e3, batch, k)
        row[mode] = found["rate"] / off
        if mode == "lookahead":
            row["hit_rate"] = found["hit_rate"]
        if batch == 1 and mode != "auto":
            row[f"{mode}_theory"] = theory(hardware, mode, alpha, trip / 1e3, k, found["hit_rate"])
    return row


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    rows: list[dict[str, Any]] = []
    for hardware in HARDWARE:
        for alpha, batch, trip in settings(options.quick):
            rows.append(measured(hardware, alpha, batch, trip))
        say(f"{hardware.name}: done")
    slowest_auto = min(row["auto"] for row in rows)
    publish(
        "simulate", {"num_rows": len(rows), "slowest_auto_over_off": slowest_auto, "rows": rows}, options.json
    )


if __name__ == "__main__":
    main()
