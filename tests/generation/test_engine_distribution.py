"""The joint distribution of three tokens through the whole engine is the target's, whatever drafts.

Where every random number is a comparison or an inverse CDF, the engine's runs are enumerated exactly (scheduler,
draft worker, wire, verifier and commit included); the coupled rule and the shared numbers of look-ahead are
tested by chi-square over thousands of seeds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from generation.drafters.link import LocalLink, ThreadLink
from generation.drafters.model import DraftWorker
from generation.types import DraftProposal, DraftRequest, LookaheadTable
from tests.generation.enumeration import BranchingRandom, Enumerator, patch_draws
from tests.generation.fakes import (
    ScriptedLink,
    chain_probability,
    make_engine,
    make_request,
    markov_model,
    random_table,
    run,
)

V = 3
TARGET = random_table(V, seed=1)
LENGTH = 3
PROMPT = [0, 1]
TableOfProbs = npt.NDArray[np.float64]


def adversarial() -> TableOfProbs:
    """Bets on what the target likes least."""
    weights = 1.0 / (TARGET + 0.02)
    return np.asarray(weights / weights.sum(-1, keepdims=True))


DRAFTS: Mapping[str, TableOfProbs] = {
    "perfect": TARGET,
    "random": random_table(V, seed=2),
    "adversarial": adversarial(),
}


def expected(
    temperature_table: TableOfProbs = TARGET, last: int = PROMPT[-1]
) -> dict[tuple[int, ...], float]:
    return {
        answer: chain_probability(temperature_table, last, answer)
        for answer in itertools.product(range(V), repeat=LENGTH)
    }


def worker_link(table: TableOfProbs, support_size: int = 32) -> LocalLink:
    return LocalLink(
        DraftWorker(markov_model(table), num_slots=4, slot_length=256, support_size=support_size)
    )


def enumerate_engine(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any], **sampling: Any
) -> dict[tuple[int, ...], float]:
    """The exact distribution of the answer; ``program`` makes a fresh engine for each path."""
    tree = Enumerator()
    patch_draws(monkeypatch, tree)
    for place in ("generation.sequence.RequestRandom", "generation.drafters.draws.RequestRandom"):
        monkeypatch.setattr(place, lambda *_: BranchingRandom(tree))

    def one_answer() -> tuple[int, ...]:
        engine = program()
        request = make_request("r", PROMPT, max_tokens=LENGTH, temperature=1.0, **sampling)
        answer = run(engine, [request])["r"]
        engine.check_integrity()
        return tuple(answer.token_ids)

    return tree.distribution(one_answer)


def assert_same(got: Mapping[tuple[int, ...], float], want: Mapping[tuple[int, ...], float]) -> None:
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-6)
    for answer, probability in want.items():
        assert got.get(answer, 0.0) == pytest.approx(probability, abs=1e-6), answer


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_model_drafts_are_exact(monkeypatch: pytest.MonkeyPatch, draft: str, method: str) -> None:
    """float32 tables: exact to the rounding of one row."""

    def program() -> Any:
        return make_engine(
            markov_model(TARGET),
            colocated=worker_link(DRAFTS[draft]),
            speculation={"mode": "colocated", "num_draft_tokens": 2, "acceptance": method},
        )

    assert_same(enumerate_engine(monkeypatch, program), expected())


@pytest.mark.parametrize("method", ["token", "block"])
def test_top_m_drafts_are_exact(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def program() -> Any:
        return make_engine(
            markov_model(TARGET),
            colocated=worker_link(DRAFTS["adversarial"], support_size=2),
            speculation={"mode": "colocated", "num_draft_tokens": 2, "acceptance": method},
        )

    assert_same(enumerate_engine(monkeypatch, program), expected())


@pytest.mark.parametrize("method", ["token", "block"])
def test_point_masses_are_exact(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A drafter that always insists on the same two tokens."""

    def program() -> Any:
        link = ScriptedLink(lambda request: DraftProposal((2, 0), kinds=("passages", "passages")))
        return make_engine(
            markov_model(TARGET),
            colocated=link,
            speculation={"mode": "colocated", "num_draft_tokens": 2, "acceptance": method},
        )

    assert_same(enumerate_engine(monkeypatch, program), expected())


def test_empty_proposals_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> Any:
        link = ScriptedLink(lambda request: None)
        return make_engine(markov_model(TARGET), colocated=link, speculation={"mode": "colocated"})

    assert_same(enumerate_engine(monkeypatch, program), expected())


def test_passages_and_model_together_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from the prompt compete with the model's proposals round by round."""

    def program() -> Any:
        return make_engine(
            markov_model(TARGET),
            colocated=worker_link(DRAFTS["random"]),
            speculation={
                "mode": "colocated",
                "passages": True,
                "passages_min_match": 1,
                "num_draft_tokens": 2,
            },
        )

    monkeypatch.setattr("tests.generation.test_engine_distribution.PROMPT", [0, 1, 2, 1, 0, 1])
    assert_same(enumerate_engine(monkeypatch, program), expected(last=1))


@pytest.mark.parametrize("method", ["token", "block"])
def test_lookahead_tables_are_exact(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """One branch a round, prepared before its outcome is known; misses are plain steps."""

    def program() -> Any:
        link = worker_link(DRAFTS["random"])
        link.is_remote = True
        return make_engine(
            markov_model(TARGET),
            remote=link,
            speculation={
                "mode": "lookahead",
                "num_draft_tokens": 1,
                "branch_budget": 1,
                "acceptance": method,
            },
        )

    assert_same(enumerate_engine(monkeypatch, program), expected())


@pytest.mark.parametrize(
    ("sampling", "processed"),
    [
        ({"top_k": 2}, lambda row: np.where(row >= np.sort(row)[-2], row, 0)),
        ({"top_p": 0.6}, lambda row: row * (np.argsort(np.argsort(-row)) < _nucleus(row, 0.6))),
        ({"min_p": 0.5}, lambda row: np.where(row >= 0.5 * row.max(), row, 0)),
        ({"logit_bias": {1: 1.5}}, lambda row: row * np.exp([0, 1.5, 0])),
        ({"logit_bias": {2: -100.0}}, lambda row: row * [1, 1, 0]),
    ],
)
def test_processed_distributions_are_what_is_sampled(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], processed: Callable[[Any], Any]
) -> None:
    table = np.stack([processed(row) / processed(row).sum() for row in TARGET])

    def program() -> Any:
        return make_engine(
            markov_model(TARGET),
            colocated=worker_link(DRAFTS["adversarial"]),
            speculation={"mode": "colocated", "num_draft_tokens": 2},
        )

    assert_same(enumerate_engine(monkeypatch, program, **sampling), expected(table))


def _nucleus(row: TableOfProbs, top_p: float) -> int:
    return int(np.searchsorted(np.cumsum(np.sort(row)[::-1]), top_p) + 1)


def test_presence_penalty_counts_accepted_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution after each token depends on the whole answer so far."""

    def program() -> Any:
        return make_engine(
            markov_model(TARGET),
            colocated=worker_link(DRAFTS["random"]),
            speculation={"mode": "colocated", "num_draft_tokens": 2},
        )

    want = {}
    for answer in itertools.product(range(V), repeat=LENGTH):
        probability, last = 1.0, PROMPT[-1]
        for i, token_id in enumerate(answer):
            weights = TARGET[last] * np.exp([-0.7 * (t in answer[:i]) for t in range(V)])
            probability *= weights[token_id] / weights.sum()
            last = token_id
        want[answer] = probability
    assert_same(enumerate_engine(monkeypatch, program, presence_penalty=0.7), want)


# -- by chi-square: what cannot be enumerated -----------------------------------------------------------


def sample(engine: Any, num_samples: int, *, seeded: bool, prefix: str = "r", **fields: Any) -> Counter[Any]:
    requests = [
        make_request(
            f"{prefix}{i}",
            PROMPT,
            max_tokens=LENGTH,
            temperature=1.0,
            seed=i if seeded else None,
            **fields,
        )
        for i in range(num_samples)
    ]
    return Counter(tuple(answer.token_ids) for answer in run(engine, requests).values())


def assert_fits(counts: Counter[Any], num_samples: int) -> None:
    want = expected()
    observed = [counts[answer] for answer in want]
    assert sum(observed) == num_samples
    result = chisquare(observed, [num_samples * p / sum(want.values()) for p in want.values()])
    assert result.pvalue > 1e-4, result


@pytest.mark.parametrize("draft", [*DRAFTS, "empty"])
def test_coupled_fits_and_is_the_same_text_whatever_drafts(draft: str) -> None:
    """Seeded requests: 1,500 seeds fit the target, and each seed's text is the plain engine's."""
    num_samples = 1500
    link = ScriptedLink(lambda _: None) if draft == "empty" else worker_link(DRAFTS[draft])
    options: dict[str, Any] = {"batch": 64, "max_waiting": 8000, "num_tokens": 64 * 64}
    if draft != "empty":
        assert isinstance(link, LocalLink)
        link.worker = DraftWorker(markov_model(DRAFTS[draft]), num_slots=64, slot_length=64)
    engine = make_engine(
        markov_model(TARGET),
        colocated=link,
        speculation={"mode": "colocated", "num_draft_tokens": 2},
        **options,
    )
    plain = make_engine(markov_model(TARGET), **options)
    requests = [
        make_request(f"r{i}", PROMPT, max_tokens=LENGTH, temperature=1.0, seed=i) for i in range(num_samples)
    ]
    got, without = run(engine, requests), run(plain, requests)
    assert all(got[name].token_ids == without[name].token_ids for name in without)
    assert_fits(Counter(tuple(answer.token_ids) for answer in got.values()), num_samples)


@pytest.mark.parametrize("method", ["token", "block"])
def test_lookahead_with_asking_on_a_miss_fits(method: str) -> None:
    """Prepared and asked-for proposals of one round must not share random numbers (block verification looks
    at all of a proposal, so sharing would show)."""
    num_samples = 2500
    worker = DraftWorker(markov_model(DRAFTS["random"]), num_slots=64, slot_length=128)
    link = LocalLink(worker)
    link.is_remote = True
    engine = make_engine(
        markov_model(TARGET),
        remote=link,
        batch=64,
        max_waiting=8000,
        num_tokens=64 * 64,
        speculation={
            "mode": "auto",
            "num_draft_tokens": 2,
            "branch_budget": 2,
            "acceptance": method,
        },
    )
    always_both(engine)
    assert_fits(sample(engine, num_samples, seeded=False), num_samples)
    assert engine.proposer.lookahead_hits > 100
    assert engine.proposer.lookahead_misses > 100


def always_both(engine: Any) -> None:
    """Look-ahead, with a synchronous question whenever the outcome was not prepared."""
    from generation.controller import Decision

    def decide(domain: str, batch_size: int, *, draft_open: bool) -> Decision:
        return Decision("lookahead", 2, sync_on_miss=True)

    engine.proposer.controller.decide = decide


def test_a_draft_thread_fits() -> None:
    """The real thing, tables from another thread: late tables change speed, never the distribution."""
    num_samples = 1000
    worker = DraftWorker(markov_model(DRAFTS["perfect"]), num_slots=64, slot_length=128)
    link = ThreadLink(worker)
    try:
        engine = make_engine(
            markov_model(TARGET),
            remote=link,
            batch=64,
            max_waiting=8000,
            num_tokens=64 * 64,
            speculation={"mode": "lookahead", "num_draft_tokens": 2, "deadline_multiple": 1.0},
        )
        assert_fits(sample(engine, num_samples, seeded=False), num_samples)
    finally:
        link.close()


def test_uniforms_of_questions_and_tables_are_distinct() -> None:
    """The same round may both ask now and prepare a table: their draws at one position are independent."""
    worker = DraftWorker(markov_model(np.full((64, 64), 1 / 64)), num_slots=2, slot_length=64)
    sampling = make_request("r", [0], temperature=1.0).sampling
    same = 0
    for round_id in range(64):
        base = DraftRequest("r", round_id, 1, (0,), 3, 0, sampling)
        (asked,) = worker.answer([base])
        (table,) = worker.answer([DraftRequest("r", round_id, 1, (0,), 3, 1, sampling)])
        assert isinstance(asked, LookaheadTable)
        assert isinstance(table, LookaheadTable)
        (now,), (prepared,) = asked.branches.values(), table.branches.values()
        same += now.token_ids[1] == prepared.token_ids[0]  # both stand at position 2
    assert same < 16


@pytest.mark.parametrize("method", ["threshold", "typical"])
def test_lossy_methods_say_so(method: str) -> None:
    engine = make_engine(
        markov_model(TARGET),
        colocated=worker_link(DRAFTS["random"]),
        speculation={"mode": "colocated", "num_draft_tokens": 2, "acceptance": method},
    )
    stats = run(engine, [make_request("r", PROMPT, max_tokens=8, temperature=1.0)])["r"].last.stats
    assert stats is not None
    assert stats.lossy
    assert stats.acceptance_method == method
