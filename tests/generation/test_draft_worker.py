"""The draft's side of the wire: prefixes, duplicates, eviction, refusals, tables that say what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from generation.acceptance import ProposalProbs
from generation.config import ModelConfig
from generation.drafters.model import DraftWorker, now_proposal
from generation.loading import load_model
from generation.model_runner import LoadedModel
from generation.types import (
    NO_PROPOSAL,
    NOW,
    DraftProposal,
    DraftRefusal,
    DraftReply,
    DraftRequest,
    LookaheadTable,
    PrefixMissing,
    SamplingParams,
)
from tests.generation.fakes import markov_model, random_table
from tests.generation.test_architectures import COMMON, PADDED, save

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9)
TEXT = tuple(torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(5)).tolist())


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, LoadedModel]:
    """A tiny real model: its keys and windows matter. ``(reference, loaded)``."""
    folder: Path = tmp_path_factory.mktemp("draft")
    config = LlamaConfig(**COMMON) if request.param == "llama" else MistralConfig(**COMMON, sliding_window=16)
    reference = save(config, folder, seed=4)
    loaded = load_model(ModelConfig(model=str(folder), dtype="float32", device="cpu", packed_linear=False))
    return reference, loaded


def worker(model: LoadedModel, **options: Any) -> DraftWorker:
    return DraftWorker(model, **{"num_slots": 4, "slot_length": 160, **options})


def ask(
    request_id: str = "r",
    round_id: int = 0,
    text: tuple[int, ...] = TEXT,
    *,
    have: int = 0,
    k: int = 3,
    budget: int = 0,
    proposal: DraftProposal = NO_PROPOSAL,
    sampling: SamplingParams = GREEDY,
    fanout: tuple[int, ...] = (),
) -> DraftRequest:
    return DraftRequest(request_id, round_id, len(text), text[have:], k, budget, sampling, proposal, fanout)


def table(reply: DraftReply) -> LookaheadTable:
    assert isinstance(reply, LookaheadTable), reply
    return reply


def one(draft: DraftWorker, request: DraftRequest) -> DraftReply:
    (reply,) = draft.answer([request])
    return reply


@torch.inference_mode()
def logits_after(reference: Any, text: tuple[int, ...]) -> torch.Tensor:
    out: torch.Tensor = reference(torch.tensor([text]), use_cache=False).logits[0, -1, :128]
    return out


def continuation(reference: Any, text: tuple[int, ...], k: int) -> tuple[int, ...]:
    """What the draft alone would say after ``text``."""
    out = list(text)
    for _ in range(k):
        out.append(int(logits_after(reference, tuple(out)).argmax()))
    return tuple(out[len(text) :])


# -- what it says ------------------------------------------------------------------------------------------


def test_asked_now_it_says_its_own_continuation(model: tuple[Any, LoadedModel]) -> None:
    reference, loaded = model
    reply = table(one(worker(loaded), ask(k=5)))
    assert reply.branches == {NOW: DraftProposal(continuation(reference, TEXT, 5))}


def check_table(
    reference: Any, text: tuple[int, ...], proposal: DraftProposal, reply: LookaheadTable
) -> None:
    """Every branch is the draft's own continuation of (text, accepted tokens, outcome token)."""
    assert reply.branches
    for (num_accepted, token_id), branch in reply.branches.items():
        prefix = (*text, *proposal.token_ids[:num_accepted], token_id)
        assert branch.token_ids == continuation(reference, prefix, len(branch))


def test_each_branch_is_what_the_draft_alone_would_say(model: tuple[Any, LoadedModel]) -> None:
    reference, loaded = model
    proposal = DraftProposal((3, 77, 12))
    reply = table(one(worker(loaded), ask(k=4, budget=8, proposal=proposal, fanout=(3, 2, 1, 2))))
    assert len(reply.branches) == 8
    assert all(len(branch) == 4 for branch in reply.branches.values())
    check_table(reference, TEXT, proposal, reply)
    for k, fan in enumerate((3, 2, 1, 2)):
        ranked = logits_after(reference, (*TEXT, *proposal.token_ids[:k])).argsort(descending=True).tolist()
        excluded = proposal.token_ids[k] if k < 3 else None
        likeliest = [token_id for token_id in ranked if token_id != excluded][:fan]
        assert [t for accepted, t in reply.branches if accepted == k] == likeliest


def test_an_empty_proposal_has_its_outcomes_too(model: tuple[Any, LoadedModel]) -> None:
    reference, loaded = model
    reply = table(one(worker(loaded), ask(k=2, budget=3)))
    assert {accepted for accepted, _ in reply.branches} == {0}
    check_table(reference, TEXT, NO_PROPOSAL, reply)


def test_a_batch_of_unlike_requests_is_answered_as_each_alone(model: tuple[Any, LoadedModel]) -> None:
    reference, loaded = model
    proposal = DraftProposal((9, 9))
    requests = [
        ask("a", k=5, budget=3, proposal=proposal),
        ask("b", text=TEXT[:7], k=2),
        ask("c", text=TEXT[:23], k=1, budget=2),
    ]
    a, b, c = (table(reply) for reply in worker(loaded).answer(requests))
    check_table(reference, TEXT, proposal, a)
    assert now_proposal(b, "timeout").token_ids == continuation(reference, TEXT[:7], 2)
    check_table(reference, TEXT[:23], NO_PROPOSAL, c)


def test_rounds_after_rounds_stay_true(model: tuple[Any, LoadedModel]) -> None:
    """Scratch rows of old branches, rejected proposals and taken branches never leak into later answers."""
    reference, loaded = model
    draft = worker(loaded)
    text, have = TEXT, 0
    proposal = NO_PROPOSAL
    for round_id in range(8):
        reply = table(
            one(draft, ask(round_id=round_id, text=text, have=have, k=3, budget=4, proposal=proposal))
        )
        check_table(reference, text, proposal, reply)
        outcomes = sorted(reply.branches)
        outcome = outcomes[round_id % len(outcomes)]
        have = len(text)
        text = (*text, *proposal.token_ids[: outcome[0]], outcome[1])
        proposal = reply.branches[outcome] if round_id % 3 else DraftProposal((round_id, 1, 2))


@pytest.mark.parametrize("size", [1, 5, 32, 512])
def test_supports_are_what_was_sampled_from(model: tuple[Any, LoadedModel], size: int) -> None:
    reference, loaded = model
    draft = worker(loaded, support_size=size)
    proposal = DraftProposal((3, 77))
    reply = table(one(draft, ask(k=3, budget=4, proposal=proposal, sampling=SAMPLED)))
    for (num_accepted, token_id), branch in reply.branches.items():
        assert branch.support_ids is not None
        assert branch.support_probs is not None
        width = min(size, loaded.vocab_size)
        assert branch.support_ids.shape == branch.support_probs.shape == (3, width)
        assert branch.support_ids.dtype == np.int64
        assert branch.support_probs.dtype == np.float32
        assert branch.support_probs.sum(-1) == pytest.approx(np.ones(3), abs=1e-5)
        probs = ProposalProbs(branch, PADDED)
        text = (*TEXT, *proposal.token_ids[:num_accepted], token_id)
        for i, drafted in enumerate(branch.token_ids):
            assert drafted in branch.support_ids[i]
            assert probs.of(i) > 0
            own = torch.softmax(logits_after(reference, text) / 0.9, -1)
            best = own.topk(width)
            want = np.zeros(PADDED)
            want[best.indices.numpy()] = (best.values / best.values.sum()).numpy()
            assert probs.dense(i) == pytest.approx(want, abs=1e-5)
            text = (*text, drafted)


def test_sampling_by_the_shipped_probabilities() -> None:
    """Over many rounds the first token's frequencies are the support's."""
    probs = random_table(6, seed=8)
    draft = DraftWorker(markov_model(probs), num_slots=2, slot_length=64, support_size=3)
    counts = np.zeros(6)
    for round_id in range(1500):
        reply = table(one(draft, ask("r", round_id, (2,), k=1, sampling=SamplingParams(temperature=1.0))))
        counts[reply.branches[NOW].token_ids[0]] += 1
    best = np.argsort(-probs[2])[:3]
    want = np.zeros(6)
    want[best] = probs[2, best] / probs[2, best].sum()
    assert counts / 1500 == pytest.approx(want, abs=0.05)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1.0, min_p=0.6),
        SamplingParams(temperature=1.0, logit_bias={1: 50.0}),
        SamplingParams(temperature=1.0, logit_bias={999: 50.0}),
    ],
)
def test_truncation_and_bias_are_the_requests(sampling: SamplingParams) -> None:
    probs = random_table(6, seed=8)
    draft = DraftWorker(markov_model(probs), num_slots=2, slot_length=64)
    row = probs[2].copy()
    if 1 in sampling.logit_bias:
        row[1] *= np.exp(50.0)
    order = np.argsort(-row)
    row /= row.sum()
    keep = np.ones(6, dtype=bool)
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    if sampling.top_p < 1:
        keep[order[1:]] = np.cumsum(row[order])[:-1] < sampling.top_p
    keep &= row >= sampling.min_p * row.max()
    want = np.where(keep, row, 0)
    proposal = table(one(draft, ask("r", 0, (2,), k=1, sampling=sampling))).branches[NOW]
    assert ProposalProbs(proposal, 6).dense(0) == pytest.approx(want / want.sum(), abs=1e-5)
    assert want[proposal.token_ids[0]] > 0


def test_a_trimmed_head_speaks_in_vocabulary_ids() -> None:
    probs = random_table(8, seed=2)
    model = markov_model(probs)
    kept = torch.tensor([1, 4, 6])
    head: Any = model.head
    head.logits = head.logits[:, kept]
    model.id_map = kept
    draft = DraftWorker(model, num_slots=2, slot_length=64)
    greedy = table(one(draft, ask("g", 0, (2,), k=2))).branches[NOW]
    first = int(kept[int(np.argmax(probs[2, kept.numpy()]))])
    assert greedy.token_ids == (first, int(kept[int(np.argmax(probs[first, kept.numpy()]))]))
    sampled = table(one(draft, ask("s", 0, (2,), k=1, sampling=SAMPLED))).branches[NOW]
    assert sampled.support_ids is not None
    assert set(sampled.support_ids[0].tolist()) == {1, 4, 6}
    biased = SamplingParams(logit_bias={6: 100.0, 0: 100.0})
    assert table(one(draft, ask("b", 0, (2,), k=1, sampling=biased))).branches[NOW].token_ids == (6,)


# -- prefixes, duplicates, eviction ------------------------------------------------------------------------


def test_a_missing_prefix_is_said_and_replaying_heals_it(model: tuple[Any, LoadedModel]) -> None:
    reference, loaded = model
    draft = worker(loaded)
    assert one(draft, ask("r", 3, have=20)) == PrefixMissing("r", 3, 0)
    one(draft, ask("r", 4, TEXT[:10]))
    assert one(draft, ask("r", 5, have=20)) == PrefixMissing("r", 5, 10)
    healed = table(one(draft, ask("r", 5, have=10)))
    assert healed.branches[NOW].token_ids == continuation(reference, TEXT, 3)


def test_duplicates_are_answered_alike(model: tuple[Any, LoadedModel]) -> None:
    draft = worker(model[1])
    one(draft, ask("r", 0, TEXT[:30], sampling=SAMPLED))
    request = ask("r", 1, have=30, budget=4, proposal=DraftProposal((5, 6)), sampling=SAMPLED)
    first, second = table(one(draft, request)), table(one(draft, request))
    assert first.branches.keys() == second.branches.keys()
    for outcome, branch in first.branches.items():
        other = second.branches[outcome]
        assert branch.token_ids == other.token_ids
        assert branch.support_probs is not None
        assert other.support_probs is not None
        assert branch.support_probs == pytest.approx(other.support_probs, abs=1e-5)
    assert draft.num_sequences == 1


def test_a_stale_or_corrected_round_is_answered_for_its_own_text(model: tuple[Any, LoadedModel]) -> None:
    """The confirmed length and ids of each message are the truth, whatever came before."""
    reference, loaded = model
    draft = worker(loaded)
    one(draft, ask("r", 5, TEXT))
    stale = table(one(draft, ask("r", 2, TEXT[:25], have=25)))
    assert stale.branches[NOW].token_ids == continuation(reference, TEXT[:25], 3)
    other = (*TEXT[:20], 1, 2, 3, *TEXT[23:])
    corrected = table(one(draft, ask("r", 6, other, have=20)))
    assert corrected.branches[NOW].token_ids == continuation(reference, other, 3)


def test_the_least_recently_used_sequence_makes_room(model: tuple[Any, LoadedModel]) -> None:
    reference, loaded = model
    draft = worker(loaded, num_slots=2)
    for name in ("a", "b", "a", "c"):
        table(one(draft, ask(name)))
    assert draft.num_evictions == 1
    assert isinstance(one(draft, ask("b", 1, have=40)), PrefixMissing)
    kept = table(one(draft, ask("a", 1, have=40)))
    assert kept.branches[NOW].token_ids == continuation(reference, TEXT, 3)


def test_nobody_in_a_batch_is_evicted_for_another_of_it(model: tuple[Any, LoadedModel]) -> None:
    draft = worker(model[1], num_slots=2)
    replies = draft.answer([ask(name) for name in "abc"])
    assert [type(reply) for reply in replies] == [LookaheadTable, LookaheadTable, DraftRefusal]
    assert replies[2] == DraftRefusal("c", 0, "overloaded")


def test_forgetting_frees_and_unknown_ids_are_fine(model: tuple[Any, LoadedModel]) -> None:
    draft = worker(model[1])
    one(draft, ask("a"))
    draft.forget(["a", "never", "a"])
    assert draft.num_sequences == 0
    assert draft.runner.pool.num_free == 4
    assert isinstance(one(draft, ask("a", 1, have=40)), PrefixMissing)


@pytest.mark.parametrize(
    "bad",
    [
        ask("bad", text=(1, 2, 128)),
        ask("bad", text=(1, -2, 3)),
        ask("bad", proposal=DraftProposal((5000,)), budget=2),
        ask("bad", text=TEXT * 5),
        ask("bad", text=()),
        DraftRequest("bad", 0, -3, (), 3, 0, GREEDY),
    ],
    ids=["beyond", "negative", "proposal", "too long", "empty", "nonsense"],
)
def test_garbage_is_refused_alone(model: tuple[Any, LoadedModel], bad: DraftRequest) -> None:
    reference, loaded = model
    draft = worker(loaded)
    refused, fine = draft.answer([bad, ask("good")])
    assert isinstance(refused, (DraftRefusal, PrefixMissing))
    assert table(fine).branches[NOW].token_ids == continuation(reference, TEXT, 3)
    draft.forget(["good", "bad"])
    assert draft.runner.pool.num_free == 4


def test_an_empty_batch_is_fine(model: tuple[Any, LoadedModel]) -> None:
    assert worker(model[1]).answer([]) == []


def test_long_prompts_are_taken_in_pieces(tmp_path: Path) -> None:
    reference = save(LlamaConfig(**{**COMMON, "max_position_embeddings": 2048}), tmp_path, seed=4)
    loaded = load_model(ModelConfig(model=str(tmp_path), dtype="float32", device="cpu", packed_linear=False))
    text = (TEXT * 30)[:1100]
    reply = table(
        one(worker(loaded, slot_length=1200), ask(text=text, budget=2, proposal=DraftProposal((7,))))
    )
    check_table(reference, text, DraftProposal((7,)), reply)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SAMPLED], ids=["greedy", "sampled"])
def test_an_unsure_draft_ends_its_proposals(model: tuple[Any, LoadedModel], sampling: SamplingParams) -> None:
    """Each proposal is the beginning of the one that grows to the end, and the first token always comes."""
    proposal = DraftProposal((3, 77, 12))
    whole = table(one(worker(model[1]), ask(k=5, budget=6, proposal=proposal, sampling=sampling)))
    lengths = set()
    for reach in (0.02, 0.2, 1.0):
        request = replace(ask(k=5, budget=6, proposal=proposal, sampling=sampling), min_reach=reach)
        short = table(one(worker(model[1]), request))
        assert short.branches.keys() == whole.branches.keys()
        for outcome, branch in short.branches.items():
            lengths.add(len(branch))
            assert 1 <= len(branch) <= 5
            assert branch.token_ids == whole.branches[outcome].token_ids[: len(branch)]
    assert len(lengths) > 2
    assert all(len(branch) == 1 for branch in short.branches.values())
