"""Nothing leaks and nobody drags others down: mixed traffic, failures, limits.

The model is a Markov chain run by the real engine; keys are covered by ``test_architectures.py``.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from generation.drafters.link import LocalLink
from generation.drafters.model import DraftWorker
from generation.kv_cache import CacheShape
from generation.types import DraftProposal, GenerationChunk, GenerationError, PromptTooLong, QueueFull
from tests.generation.fakes import (
    LetterTokenizer,
    ScriptedLink,
    collect,
    make_engine,
    make_request,
    markov_model,
    random_table,
    run,
)

V = 16
TABLE = random_table(V, seed=3, sharpness=2.0)
END = V - 1


def worker(table: Any = TABLE, num_slots: int = 8) -> DraftWorker:
    return DraftWorker(markov_model(table), num_slots=num_slots, slot_length=160)


def target(**options: Any) -> Any:
    model = markov_model(TABLE, eos_token_ids=(END,), **options)
    # Real keys, so that slots and prefix blocks are really written and copied.
    model.cache_shape = CacheShape(((1, 4),) * 2, torch.float32, torch.device("cpu"))
    return model


def held_bytes(engine: Any) -> int:
    pool, prefix = engine.runner.pool, engine.prefix_cache
    tensors = [*pool.keys, *pool.values, *prefix._keys, *prefix._values]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def mixed_request(chance: random.Random, number: int) -> Any:
    prompt = [chance.randrange(V - 1) for _ in range(chance.choice([1, 3, 15, 16, 17, 40, 90]))]
    if chance.random() < 0.3:
        prompt = [1, 2, 3, 4] * 8 + prompt[:20]
    fields: dict[str, Any] = {
        "max_tokens": chance.choice([1, 2, 5, 12, 30]),
        "temperature": chance.choice([0.0, 0.7, 1.3]),
        "seed": chance.choice([None, number]),
        "stop": chance.choice([(), (), ("ab",), ("c", "dd")]),
        "ignore_eos": chance.random() < 0.3,
        "min_tokens": chance.choice([0, 0, 2]),
        "logprobs": chance.choice([None, None, 0, 3]),
        "mode": chance.choice([None, None, "off", "passages", "colocated"]),
        "acceptance": chance.choice([None, "token", "block", "typical"]),
        "presence_penalty": chance.choice([0.0, 0.0, 0.5]),
        "domain": chance.choice(["legal", "medical"]),
    }
    if chance.random() < 0.05:
        fields["deadline_seconds"] = 0.0
    return make_request(f"r{number}", prompt, **fields)


def test_five_hundred_mixed_requests_leave_everything_free() -> None:
    chance = random.Random(7)
    draft = worker()
    engine = make_engine(
        target(),
        colocated=LocalLink(draft),
        num_tokens=8 * 160,
        max_waiting=12,
        prefill_chunk_tokens=24,
        speculation={"mode": "auto", "passages": True, "history": True, "history_tokens": 2000},
    )
    memory = held_bytes(engine)
    chunks: list[GenerationChunk] = []
    waiting = [mixed_request(chance, number) for number in range(500)]
    refused, cancelled, live = 0, 0, set[str]()
    while waiting or engine.has_work:
        for _ in range(chance.randrange(4)):
            if waiting:
                request = waiting.pop()
                try:
                    engine.add(request)
                    live.add(request.request_id)
                except QueueFull:
                    refused += 1
                    waiting.insert(0, request)
        if live and chance.random() < 0.1:
            victim = chance.choice(sorted(live))
            ended = engine.cancel(victim)
            if ended is not None:
                cancelled += 1
                assert ended.finish_reason == "cancelled"
                assert victim not in draft._held
                chunks.append(ended)
        chunks.extend(engine.step())
        live -= {chunk.request_id for chunk in chunks if chunk.finish_reason is not None}
        engine.check_integrity()
    answers = collect(chunks)
    assert len(answers) == 500
    for answer in answers.values():
        assert [chunk.finish_reason for chunk in answer.chunks].count(None) == len(answer.chunks) - 1
        assert answer.last.stats is not None
        assert answer.last.timings is not None
    reasons = dict.fromkeys(("stop", "length", "cancelled", "error"), 0)
    for answer in answers.values():
        reasons[str(answer.last.finish_reason)] += 1
    assert all(reasons.values()), reasons  # deadlines are the errors
    assert refused > 0
    assert cancelled == reasons["cancelled"]
    assert engine.runner.pool.num_free == engine.runner.pool.num_slots
    assert draft.num_sequences == 0
    assert draft.runner.pool.num_free == draft.runner.pool.num_slots
    assert not engine.proposer._tracks
    assert held_bytes(engine) == memory


def test_cancel_frees_the_slot_at_once_and_a_second_cancel_finds_nothing() -> None:
    engine = make_engine(target(), batch=1)
    engine.add(make_request("a", [1] * 50, max_tokens=50, ignore_eos=True))
    engine.add(make_request("b", [1], max_tokens=5))
    engine.step()
    assert engine.runner.pool.num_free == 0
    assert engine.cancel("a") is not None
    assert engine.runner.pool.num_free == 1
    assert engine.cancel("a") is None
    assert engine.cancel("never seen") is None
    assert {c.request_id for c in engine.step()} <= {"b"}
    engine.check_integrity()


def test_cancelling_in_the_middle_of_a_prompt() -> None:
    engine = make_engine(target(), batch=1, num_tokens=512, prefill_chunk_tokens=16)
    engine.add(make_request("a", [1] * 100, max_tokens=5))
    engine.step()
    ended = engine.cancel("a")
    assert ended is not None
    assert ended.token_ids == ()
    engine.check_integrity()
    assert run(engine, [make_request("b", [1] * 100, max_tokens=3, ignore_eos=True)])["b"].last.error is None


# -- one request's trouble ----------------------------------------------------------------------------


class _Poison(nn.Module):
    """The Markov head, except that one token's row is not a number."""

    def __init__(self, head: nn.Module, token_id: int) -> None:
        super().__init__()
        self.head = head
        self.token_id = token_id
        self.active = True

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden).clone()
        if self.active:
            logits[hidden.argmax(-1) == self.token_id] = float("nan")
        return logits


def test_nan_logits_end_one_request_alone_and_leave_no_trace() -> None:
    model = target()
    model.head = _Poison(model.head, token_id=9)
    engine = make_engine(model, cache={"block_size": 4})
    plain = run(make_engine(target()), [make_request("b", [1, 2], max_tokens=8)])["b"]
    sick = [1, 2, 3, 4, 9]
    got = run(engine, [make_request("a", [*sick, 9], max_tokens=8), make_request("b", [1, 2], max_tokens=8)])
    assert got["a"].last.finish_reason == "error"
    assert got["a"].last.error is not None
    assert "not numbers" in got["a"].last.error
    assert got["b"].token_ids == plain.token_ids
    engine.check_integrity()
    # What was computed beside a NaN is not kept as a prefix.
    assert engine.prefix_cache is not None
    assert engine.prefix_cache.load([*sick, 9], 0) == 0


def test_nan_in_the_middle_of_an_answer() -> None:
    model = markov_model(np.roll(np.eye(V), 1, axis=1) * 0.9 + 0.1 / V)  # 0, 1, 2, ... at temperature 0
    model.head = _Poison(model.head, token_id=5)
    engine = make_engine(model)
    got = run(engine, [make_request("a", [1], max_tokens=9), make_request("b", [8], max_tokens=4)])
    assert got["a"].token_ids == [2, 3, 4, 5]
    assert got["a"].last.finish_reason == "error"
    assert got["b"].token_ids == [9, 10, 11, 12]
    engine.check_integrity()


class _Raises(LetterTokenizer):
    """Cannot write one token."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        if 7 in token_ids:
            raise RuntimeError("no such letter")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_request_that_raises_ends_alone() -> None:
    model = markov_model(np.roll(np.eye(V), 1, axis=1) * 0.9 + 0.1 / V)
    engine = make_engine(model, _Raises())
    got = run(engine, [make_request("a", [5], max_tokens=5), make_request("b", [8], max_tokens=4)])
    assert got["a"].last.finish_reason == "error"
    assert "no such letter" in str(got["a"].last.error)
    assert got["b"].token_ids == [9, 10, 11, 12]
    engine.check_integrity()
    assert engine.runner.pool.num_free == engine.runner.pool.num_slots


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-45},
        {"temperature": 1.0, "logit_bias": {3: float("inf")}},
        {"temperature": 1.0, "logit_bias": {3: float("nan")}},
        {"temperature": 1.0, "logit_bias": {t: float("-inf") for t in range(V)}},
    ],
)
def test_overflowing_sampling_ends_alone(sampling: dict[str, Any]) -> None:
    engine = make_engine(target(), colocated=LocalLink(worker()), speculation={"mode": "colocated"})
    plain = run(make_engine(target()), [make_request("b", [1, 2], max_tokens=8)])["b"]
    got = run(
        engine, [make_request("a", [1], max_tokens=4, **sampling), make_request("b", [1, 2], max_tokens=8)]
    )
    assert got["a"].last.finish_reason == "error"
    assert got["b"].token_ids == plain.token_ids
    engine.check_integrity()


def test_top_p_zero_is_the_likeliest_token() -> None:
    engine = make_engine(target(), colocated=LocalLink(worker()), speculation={"mode": "colocated"})
    got = run(
        engine,
        [
            make_request("a", [1], max_tokens=6, temperature=1.0, top_p=0.0),
            make_request("b", [1], max_tokens=6),
        ],
    )
    assert got["a"].token_ids == got["b"].token_ids


def test_a_draft_that_is_not_a_number_costs_nothing_but_its_proposals() -> None:
    broken = markov_model(np.full((V, V), np.nan))
    draft = DraftWorker(broken, num_slots=8, slot_length=160)
    engine = make_engine(target(), colocated=LocalLink(draft), speculation={"mode": "colocated"})
    fields: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "seed": 4}
    plain = run(make_engine(target()), [make_request("a", [1], **fields)])["a"]
    got = run(engine, [make_request("a", [1], **fields)])["a"]
    assert got.token_ids == plain.token_ids
    assert got.last.stats is not None
    assert got.last.stats.rounds_by_cause.keys() <= {"no_proposal_draft_down", "no_proposal_off"}


def test_a_draft_that_says_too_much_is_cut_to_the_room_left() -> None:
    link = ScriptedLink(lambda request: DraftProposal((1,) * 16, kinds=("passages",) * 16))
    engine = make_engine(target(), colocated=link, batch=1, num_tokens=64, speculation={"mode": "colocated"})
    got = run(engine, [make_request("a", [1] * 58, max_tokens=50, ignore_eos=True)])["a"]
    assert got.last.finish_reason == "length"
    assert len(got.token_ids) == 6
    engine.check_integrity()


# -- limits -----------------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_names_both_lengths() -> None:
    engine = make_engine(target(), batch=2, num_tokens=256)
    with pytest.raises(PromptTooLong, match=r"128 tokens.* 128 "):
        engine.add(make_request("a", [1] * 128))
    engine.add(make_request("b", [1] * 127, max_tokens=9, ignore_eos=True))
    assert len(collect(engine.generate([]))["b"].token_ids) == 1
    with pytest.raises(PromptTooLong, match=r"300 tokens.* 128 "):
        engine.add(make_request("c", [1] * 300))


def test_refusals_are_clear_and_change_nothing() -> None:
    engine = make_engine(target())
    engine.add(make_request("a", [1], max_tokens=3))
    for request, code in [
        (make_request("a", [1]), "duplicate_request"),
        (make_request("b", []), "empty_prompt"),
        (make_request("b", [1], max_tokens=0), "invalid_max_tokens"),
        (make_request("b", [1], max_tokens=-4), "invalid_max_tokens"),
        (make_request("b", [V]), "invalid_prompt"),
        (make_request("b", [-1]), "invalid_prompt"),
    ]:
        with pytest.raises(GenerationError) as refusal:
            engine.add(request)
        assert refusal.value.code == code
    assert run(engine, [])["a"].last.finish_reason in ("stop", "length")
    engine.check_integrity()


def test_an_id_may_come_again_once_its_request_has_ended() -> None:
    engine = make_engine(target())
    first = run(engine, [make_request("a", [1], max_tokens=5)])["a"]
    assert run(engine, [make_request("a", [1], max_tokens=5)])["a"].token_ids == first.token_ids


def test_the_queue_is_bounded() -> None:
    engine = make_engine(target(), batch=2, max_waiting=3)
    for number in range(5):
        engine.add(make_request(f"r{number}", [1], max_tokens=2))
    with pytest.raises(QueueFull) as refusal:
        engine.add(make_request("r5", [1]))
    assert refusal.value.code == "overloaded"
    assert len(run(engine, [])) == 5


def test_deadlines_end_waiting_and_running_requests() -> None:
    engine = make_engine(target(), batch=1)
    now = [100.0]
    engine.scheduler._clock = lambda: now[0]
    engine.add(make_request("a", [1], max_tokens=50, ignore_eos=True, deadline_seconds=5.0))
    engine.add(make_request("b", [1], max_tokens=50, ignore_eos=True, deadline_seconds=3.0))
    engine.add(make_request("c", [1], max_tokens=2, ignore_eos=True))
    for sequence in engine.scheduler.waiting:
        sequence.arrived_at = now[0]
    assert all(chunk.finish_reason is None for chunk in engine.step())
    now[0] += 4.0
    assert [c.request_id for c in engine.step() if c.finish_reason == "error"] == ["b"]
    now[0] += 4.0
    ended = [c for c in engine.step() if c.finish_reason == "error"]
    assert [c.request_id for c in ended] == ["a"]
    assert "deadline" in str(ended[0].error)
    assert run(engine, [])["c"].last.finish_reason == "length"
    engine.check_integrity()


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    """Every step of the long prefill also gives the running request a round."""
    engine = make_engine(target(), batch=2, num_tokens=2 * 512, prefill_chunk_tokens=32)
    engine.add(make_request("short", [1], max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add(make_request("long", [2] * 320, max_tokens=2, ignore_eos=True))
    for _ in range(9):
        assert [chunk.request_id for chunk in engine.step()] == ["short"]
    assert {chunk.request_id for chunk in engine.step()} == {"short", "long"}
