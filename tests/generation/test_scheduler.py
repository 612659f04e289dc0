"""Admission, chunks and commits, with fakes: no model, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from generation.scheduler import Scheduler
from generation.sequence import Sequence
from generation.types import (
    DraftProposal,
    GenerationError,
    PromptTooLong,
    QueueFull,
    TokenLogprob,
    Verification,
)
from tests.generation.fakes import LetterTokenizer, make_request


@dataclass
class FakeSlots:
    free_slots: list[int]
    poisoned: list[int] = field(default_factory=list)

    def allocate(self) -> int | None:
        return self.free_slots.pop(0) if self.free_slots else None

    def free(self, slot: int, *, poisoned: bool | None = False) -> None:
        self.free_slots.append(slot)
        if poisoned:
            self.poisoned.append(slot)


@dataclass
class FakeVerdict:
    verification: Verification | None = None
    error: GenerationError | None = None
    proposal: DraftProposal = field(default_factory=DraftProposal)
    logprobs: list[TokenLogprob] | None = None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduler(num_slots: int = 2, **options: Any) -> Scheduler:
    return Scheduler(
        FakeSlots(list(range(num_slots))),
        **{
            "max_batch_size": num_slots,
            "max_waiting": 4,
            "prefill_chunk_tokens": 10,
            "context_length": 100,
            **options,
        },
    )


def sequence(name: str, prompt_length: int = 4, clock: Any = None, **sampling: Any) -> Sequence:
    options = {"clock": clock} if clock is not None else {}
    return Sequence(make_request(name, range(prompt_length), **sampling), LetterTokenizer(), **options)


def token(*ids: int) -> FakeVerdict:
    return FakeVerdict(Verification(len(ids) - 1, ids, "bonus"), proposal=DraftProposal(ids[:-1]))


def finish_prefill(sched: Scheduler) -> None:
    """Run prompts through until everything running has its first token."""
    while sched.waiting or any(s.is_prefilling for s in sched.running):
        plan, _ = sched.schedule()
        for seq, num_tokens in plan.prefills:
            sched.prefilled(seq, num_tokens)
            if seq.num_computed == len(seq.token_ids):
                sched.commit([seq], [token(1)], rounds=False)


def test_first_come_first_served() -> None:
    sched = scheduler()
    for name in "abcd":
        sched.add(sequence(name))
    sched.schedule()
    assert [s.request_id for s in sched.running] == ["a", "b"]
    assert sched.cancel("a") is not None
    sched.schedule()
    assert [s.request_id for s in sched.running] == ["b", "c"]
    assert sorted(sched.check_integrity()) == [0, 1]


def test_prompts_go_in_chunks_beside_rounds() -> None:
    sched = scheduler(3)
    sched.add(sequence("short", 4))
    finish_prefill(sched)
    sched.add(sequence("long", 23))
    sched.add(sequence("next", 5))
    seen = []
    for _ in range(3):
        plan, _ = sched.schedule()
        assert [s.request_id for s in plan.decoding] == ["short"]
        seen.append([(s.request_id, n) for s, n in plan.prefills])
        for seq, num_tokens in plan.prefills:
            sched.prefilled(seq, num_tokens)
    assert seen == [[("long", 10)], [("long", 10)], [("long", 3), ("next", 5)]]


def test_cached_tokens_are_not_prefilled() -> None:
    sched = scheduler(on_admit=lambda seq: 8)
    sched.add(sequence("a", 12))
    plan, _ = sched.schedule()
    assert [(s.request_id, n) for s, n in plan.prefills] == [("a", 4)]
    assert sched.running[0].num_cached_tokens == 8


def test_a_prefix_is_kept_only_once_its_logits_proved_good() -> None:
    kept: list[str] = []
    sched = scheduler(on_prefilled=lambda seq: kept.append(seq.request_id))
    sched.add(sequence("good"))
    sched.add(sequence("bad"))
    plan, _ = sched.schedule()
    for seq, num_tokens in plan.prefills:
        sched.prefilled(seq, num_tokens)
    assert kept == []
    nan = FakeVerdict(error=GenerationError("not numbers", "nan_logits"))
    sched.commit([s for s, _ in plan.prefills], [token(1), nan], rounds=False)
    assert kept == ["good"]
    assert isinstance(sched._slots, FakeSlots)
    assert sched._slots.poisoned == [1]


def test_a_failed_commit_ends_alone() -> None:
    ended: list[str] = []
    sched = scheduler(on_finish=lambda seq: ended.append(seq.request_id))
    sched.add(sequence("a"))
    sched.add(sequence("b"))
    finish_prefill(sched)
    a, b = sched.running
    bad = FakeVerdict(error=GenerationError("no", "x"))
    chunks = sched.commit([a, b], [bad, token(2, 3)], rounds=True)
    assert [(c.request_id, c.finish_reason, c.error) for c in chunks] == [
        ("a", "error", "no"),
        ("b", None, None),
    ]
    assert chunks[1].token_ids == (2, 3)
    assert ended == ["a"]
    assert sched.running == [b]
    assert b.num_computed == len(b.token_ids) - 1
    sched.check_integrity()


def test_refusals() -> None:
    sched = scheduler(num_slots=1, max_waiting=1)
    with pytest.raises(PromptTooLong, match=r"100 tokens.*100"):
        sched.add(sequence("x", 100))
    with pytest.raises(GenerationError, match="empty"):
        sched.add(sequence("x", 0))
    sched.add(sequence("a"))
    with pytest.raises(GenerationError, match="a is running"):
        sched.add(sequence("a"))
    sched.add(sequence("b"))
    with pytest.raises(QueueFull, match="2 requests"):
        sched.add(sequence("c"))
    assert [s.request_id for s in sched.waiting] == ["a", "b"]


def test_answers_end_at_the_context() -> None:
    seq = Sequence(make_request("a", range(5), max_tokens=50), LetterTokenizer(), context_length=8)
    chunk = seq.commit(DraftProposal((1, 2, 3)), Verification(3, (1, 2, 3, 4), "bonus"), [], counts=True)
    assert chunk.finish_reason == "length"
    assert chunk.token_ids == (1, 2, 3)


def test_deadlines_count_from_arrival() -> None:
    clock = Clock()
    sched = scheduler(num_slots=1, clock=clock)
    sched.add(sequence("a", clock=clock, deadline_seconds=2.0))
    sched.add(sequence("b", clock=clock, deadline_seconds=1.0))
    assert sched.schedule()[1] == []
    clock.now = 1.5
    assert [(c.request_id, c.finish_reason) for c in sched.schedule()[1]] == [("b", "error")]
    clock.now = 2.5
    plan, ended = sched.schedule()
    assert [c.request_id for c in ended] == ["a"]
    assert not plan
    assert not sched.running


def test_timings_are_of_the_clock() -> None:
    clock = Clock()
    sched = scheduler(num_slots=1, clock=clock)
    sched.add(sequence("a", clock=clock, max_tokens=2))
    clock.now = 1.0
    plan, _ = sched.schedule()
    sched.prefilled(*plan.prefills[0])
    clock.now = 3.0
    sched.commit([sched.running[0]], [token(1)], rounds=False)
    clock.now = 7.0
    (chunk,) = sched.commit([sched.running[0]], [token(1)], rounds=True)
    assert chunk.timings is not None
    assert chunk.timings.queue_seconds == pytest.approx(1.0)
    assert chunk.timings.prefill_seconds == pytest.approx(2.0)
    assert chunk.timings.time_to_first_token_seconds == pytest.approx(3.0)
    assert chunk.timings.decode_seconds == pytest.approx(4.0)


def test_end_tokens_respect_the_minimum() -> None:
    seq = Sequence(
        make_request("a", [1], min_tokens=2, stop_token_ids=(9,)), LetterTokenizer(), eos_token_ids=(8,)
    )
    assert seq.end_token_ids == (8, 9)
    chunk = seq.commit(DraftProposal(), Verification(2, (3, 3, 9), "bonus"), [], counts=True)
    assert chunk.finish_reason == "stop"
    assert chunk.token_ids == (3, 3)
    ignoring = Sequence(make_request("a", [1], ignore_eos=True), LetterTokenizer(), eos_token_ids=(8,))
    assert ignoring.end_token_ids == ()
