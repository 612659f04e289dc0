"""The mathematics of acceptance by exact enumeration, to 1e-12: worked numbers and random tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generation import acceptance
from generation.acceptance import Probs, inverse_cdf, overlap, residual
from generation.controller import expected_accepted
from generation.types import DrafterKind, DraftProposal, Verification
from tests.generation.enumeration import Enumerator, Uniform, branching_inverse_cdf

Rule = Callable[[Probs, DraftProposal, Sequence[float]], Verification]
Tables = list[npt.NDArray[np.float64]]
"""``[i]``: rows of position i, by the i tokens before it: ``[vocab ** i, vocab]``."""

RULES: dict[str, Rule] = {"token": acceptance.verify_token_wise, "block": acceptance.verify_block}


def context(token_ids: Sequence[int], vocab_size: int) -> int:
    """The row of a table that belongs to these tokens."""
    return sum(token_id * vocab_size**i for i, token_id in enumerate(reversed(list(token_ids))))


def path_probability(tables: Tables, token_ids: Sequence[int], vocab_size: int) -> float:
    return float(np.prod([tables[i][context(token_ids[:i], vocab_size), t] for i, t in enumerate(token_ids)]))


def as_proposal(draft: Tables, token_ids: Sequence[int], kinds: Sequence[DrafterKind] = ()) -> DraftProposal:
    """The proposal as it goes over the wire: the whole distributions as supports, float64 for exactness."""
    vocab_size = draft[0].shape[-1]
    rows = [draft[i][context(token_ids[:i], vocab_size)] for i in range(len(token_ids))]
    ids = np.tile(np.arange(vocab_size), (len(token_ids), 1))
    return DraftProposal(tuple(token_ids), ids, np.stack(rows), tuple(kinds))


def exact(
    rule: Rule,
    target: Tables,
    draft: Tables,
    k: int,
    *,
    length: int,
    propose: Callable[..., DraftProposal],
    stops: Callable[[Sequence[int]], bool] = lambda drafted: False,
) -> tuple[dict[tuple[int, ...], float], float]:
    """The distribution of the first ``length`` tokens of one round, and the expected tokens of the round.

    Where the round gave fewer than ``length`` tokens, the rest comes from the target, as later rounds would.
    ``stops``: whether the draft ends its proposal after these tokens.
    """
    vocab_size = target[0].shape[-1]
    tree = Enumerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "inverse_cdf", branching_inverse_cdf(tree))

        def one_round() -> tuple[int, ...]:
            drafted: list[int] = []
            for i in range(k):
                drafted.append(tree.choose(draft[i][context(drafted, vocab_size)].tolist()))
                if stops(drafted):
                    break
            num_rows = len(drafted) + 1
            rows = np.stack([target[i][context(drafted[:i], vocab_size)] for i in range(num_rows)])
            verification = rule(rows, propose(draft, drafted), [Uniform(tree) for _ in range(num_rows)])
            assert len(verification.token_ids) == verification.num_accepted + 1
            assert verification.token_ids[:-1] == tuple(drafted[: verification.num_accepted])
            return verification.token_ids

        rounds = tree.distribution(one_round)
    assert sum(rounds.values()) == pytest.approx(1.0, abs=1e-12)
    out = dict.fromkeys(itertools.product(range(vocab_size), repeat=length), 0.0)
    for tokens, weight in rounds.items():
        missing = length - len(tokens)
        for rest in itertools.product(range(vocab_size), repeat=max(0, missing)):
            whole = (*tokens, *rest)
            tail = path_probability(target, whole, vocab_size) / path_probability(target, tokens, vocab_size)
            out[whole[:length]] += weight * (tail if missing > 0 else 1.0)
    return out, sum(len(tokens) * weight for tokens, weight in rounds.items())


def assert_exact(
    rule: Rule,
    target: Tables,
    draft: Tables,
    k: int,
    propose: Callable[..., DraftProposal] = as_proposal,
    stops: Callable[[Sequence[int]], bool] = lambda drafted: False,
) -> float:
    """One round of this rule is distributed as the target; returns the expected tokens."""
    got, expected_tokens = exact(rule, target, draft, k, length=k + 1, propose=propose, stops=stops)
    for tokens, probability in got.items():
        assert probability == pytest.approx(
            path_probability(target, tokens, target[0].shape[-1]), abs=1e-12
        ), tokens
    return expected_tokens


# -- the worked numbers of speculation.md ---------------------------------------------------------------

TARGET = np.array([0.6, 0.3, 0.1])
DRAFT = np.array([0.3, 0.5, 0.2])
BLOCK_TARGET: Tables = [np.array([[0.6, 0.4]]), np.array([[0.9, 0.1], [0.2, 0.8]]), np.full((4, 2), 0.5)]
BLOCK_DRAFT: Tables = [np.array([[0.3, 0.7]]), np.array([[0.5, 0.5], [0.6, 0.4]])]


def test_worked_overlap_and_residual() -> None:
    assert overlap(TARGET, DRAFT) == pytest.approx(0.7, abs=1e-12)
    left = residual(TARGET, DRAFT)
    assert (left / left.sum()).tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-12)
    assert overlap(TARGET, DRAFT) == pytest.approx(1 - 0.5 * np.abs(TARGET - DRAFT).sum(), abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_worked_single_position(rule: str) -> None:
    after = np.tile(TARGET, (3, 1))
    assert assert_exact(RULES[rule], [TARGET[None], after], [DRAFT[None]], 1) == pytest.approx(1.7, abs=1e-12)


@pytest.mark.parametrize(("rule", "tokens_a_round"), [("token", 53 / 25), ("block", 56 / 25)])
def test_worked_block(rule: str, tokens_a_round: float) -> None:
    got, tokens = exact(RULES[rule], BLOCK_TARGET, BLOCK_DRAFT, 2, length=2, propose=as_proposal)
    worked = {(0, 0): 0.54, (0, 1): 0.06, (1, 0): 0.08, (1, 1): 0.32}
    assert got == pytest.approx(worked, abs=1e-12)
    assert tokens == pytest.approx(tokens_a_round, abs=1e-12)


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"), [(0.5, 4, 1.9375), (0.7, 4, 2.7731), (0.8, 4, 3.3616), (0.85, 8, 5.1226)]
)
def test_worked_tokens_a_round(alpha: float, k: int, tokens: float) -> None:
    assert 1 + expected_accepted(alpha, k) == pytest.approx(tokens, abs=5e-5)
    assert 1 + expected_accepted(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_a_round_are_the_formula(rule: str) -> None:
    """With the same two rows everywhere positions are independent, so token-wise gives the formula exactly."""
    vocab_size, k = 2, 3
    target = [np.tile([0.7, 0.3], (vocab_size**i, 1)) for i in range(k + 1)]
    draft = [np.tile([0.4, 0.6], (vocab_size**i, 1)) for i in range(k)]
    tokens = assert_exact(RULES[rule], target, draft, k)
    if rule == "token":
        assert tokens == pytest.approx(1 + expected_accepted(0.7, k), abs=1e-12)
    else:
        assert tokens >= 1 + expected_accepted(0.7, k) - 1e-12


def test_verifying_truncated_drafts_with_the_full_distribution_is_wrong() -> None:
    """The rule of the wire has teeth here: the enumeration notices what it forbids."""
    full, truncated = np.array([0.3, 0.5, 0.2]), np.array([0.375, 0.625, 0.0])

    def shipped_wrongly(draft: Tables, drafted: Sequence[int]) -> DraftProposal:
        return as_proposal([full[None]], drafted)

    target: Tables = [TARGET[None], np.tile(TARGET, (3, 1))]
    assert_exact(acceptance.verify_token_wise, target, [truncated[None]], 1)
    got, _ = exact(
        acceptance.verify_token_wise, target, [truncated[None]], 1, length=1, propose=shipped_wrongly
    )
    assert max(abs(got[(t,)] - TARGET[t]) for t in range(3)) > 0.01


# -- random tables ----------------------------------------------------------------------------------------


@st.composite
def table_pairs(draw: st.DrawFn, max_k: int = 3) -> tuple[Tables, Tables, int]:
    """Target and draft tables of k positions; zeros are frequent, whole rows may agree."""
    k = draw(st.integers(1, max_k))
    vocab_size = draw(st.integers(2, 3 if k < 3 else 2))
    weight = st.one_of(st.just(0.0), st.floats(0.01, 1.0))

    def table(i: int) -> npt.NDArray[np.float64]:
        rows = []
        for _ in range(vocab_size**i):
            row = np.array(draw(st.lists(weight, min_size=vocab_size, max_size=vocab_size)))
            row[draw(st.integers(0, vocab_size - 1))] += 0.05
            rows.append(row / row.sum())
        return np.stack(rows)

    target = [table(i) for i in range(k + 1)]
    draft = [target[i] if draw(st.booleans()) and i else table(i) for i in range(k)]
    return target, draft, k


@settings(max_examples=30, deadline=None)
@given(table_pairs())
def test_random_tables_are_exact_and_block_is_never_worse(pair: tuple[Tables, Tables, int]) -> None:
    target, draft, k = pair
    token_wise = assert_exact(acceptance.verify_token_wise, target, draft, k)
    block = assert_exact(acceptance.verify_block, target, draft, k)
    assert block >= token_wise - 1e-12


@settings(max_examples=20, deadline=None)
@given(table_pairs(), st.integers(1, 2), st.sampled_from(sorted(RULES)))
def test_top_m_supports_are_exact(pair: tuple[Tables, Tables, int], m: int, rule: str) -> None:
    """The draft keeps its m likeliest tokens, renormalises, samples from and ships exactly those."""
    target, draft, k = pair
    ids = [np.argsort(-table, axis=-1, kind="stable")[:, :m] for table in draft]
    kept = []
    for table, best in zip(draft, ids, strict=True):
        small = np.zeros_like(table)
        np.put_along_axis(small, best, np.take_along_axis(table, best, -1), -1)
        kept.append(small / small.sum(-1, keepdims=True))

    def shipped(_: Tables, drafted: Sequence[int]) -> DraftProposal:
        vocab_size = draft[0].shape[-1]
        places = [context(drafted[:i], vocab_size) for i in range(len(drafted))]
        return DraftProposal(
            tuple(drafted),
            np.stack([ids[i][place] for i, place in enumerate(places)]),
            np.stack([kept[i][place][ids[i][place]] for i, place in enumerate(places)]),
        )

    assert_exact(RULES[rule], target, kept, k, shipped)


@settings(max_examples=30, deadline=None)
@given(table_pairs(), st.floats(0.05, 0.9), st.sampled_from(sorted(RULES)))
def test_proposals_that_end_in_doubt_are_exact(
    pair: tuple[Tables, Tables, int], min_reach: float, rule: str
) -> None:
    """Their length depends on the tokens drawn so far, as the draft worker's does, and never on the next one."""
    target, draft, k = pair
    vocab_size = draft[0].shape[-1]

    def in_doubt(drafted: Sequence[int]) -> bool:
        return path_probability(draft, drafted, vocab_size) < min_reach

    assert_exact(RULES[rule], target, draft, k, stops=in_doubt)


def one_hot_tables(drafted: Sequence[int], vocab_size: int) -> Tables:
    return [np.eye(vocab_size)[[t] * vocab_size**i] for i, t in enumerate(drafted)]


@settings(max_examples=20, deadline=None)
@given(table_pairs(), st.data(), st.sampled_from(sorted(RULES)))
def test_point_masses_are_exact_and_gain_nothing_from_blocks(
    pair: tuple[Tables, Tables, int], data: st.DataObject, rule: str
) -> None:
    target, draft, k = pair
    vocab_size = draft[0].shape[-1]
    copied = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=k, max_size=k))
    tables = one_hot_tables(copied, vocab_size)
    kind: DrafterKind = "passages"
    copied_kinds = (kind,) * k

    def ids_only(_: Tables, drafted: Sequence[int]) -> DraftProposal:
        return DraftProposal(tuple(drafted), kinds=copied_kinds)

    tokens = assert_exact(RULES[rule], target, tables, k, ids_only)
    reach = [path_probability(target, copied[: i + 1], vocab_size) for i in range(k)]
    assert tokens == pytest.approx(1 + sum(reach), abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(table_pairs(), st.data(), st.sampled_from(sorted(RULES)))
def test_mixed_kinds_are_exact(pair: tuple[Tables, Tables, int], data: st.DataObject, rule: str) -> None:
    """A passage token followed by model tokens, or the other way round, under one rule."""
    target, draft, k = pair
    vocab_size = draft[0].shape[-1]
    kinds: list[DrafterKind] = data.draw(
        st.lists(st.sampled_from(["model", "passages"]), min_size=k, max_size=k)
    )
    copied = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=k, max_size=k))
    hot = one_hot_tables(copied, vocab_size)
    mixed = [hot[i] if kinds[i] == "passages" else draft[i] for i in range(k)]

    def shipped(_: Tables, drafted: Sequence[int]) -> DraftProposal:
        return as_proposal(draft, drafted, kinds)

    assert_exact(RULES[rule], target, mixed, k, shipped)


def test_an_empty_proposal_is_plain_decoding() -> None:
    for rule in RULES.values():
        got, tokens = exact(rule, [TARGET[None]], [], 0, length=1, propose=lambda *_: DraftProposal())
        assert tokens == pytest.approx(1, abs=1e-12)
        assert got == pytest.approx({(t,): TARGET[t] for t in range(3)}, abs=1e-12)


# -- draws -------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).filter(lambda w: sum(w) > 0.01), st.integers(0, 40)
)
def test_inverse_cdf_shares(weights: list[float], cell: int) -> None:
    """Each index owns exactly its share of [0, 1): both sides of every boundary are right."""
    array = np.array(weights)
    bounds = np.cumsum(array) / array.sum()
    for index, bound in enumerate(bounds):
        below = float(bounds[index - 1]) if index else 0.0
        if bound - below > 1e-9:
            inside = below + (float(bound) - below) * (cell + 0.5) / 41
            assert inverse_cdf(array, inside) == index
    assert array[inverse_cdf(array, 1.0 - 2**-53)] > 0
    assert array[inverse_cdf(array, 0.0)] > 0


def test_a_rejection_by_rounding_alone_still_yields_a_token() -> None:
    """float32 rows that sum to just under one leave an empty residual when the draft is perfect."""
    row = np.array([1.0 - 2**-24, 0.0], dtype=np.float32)
    target = np.stack([row, row])
    almost_one = [1.0 - 2**-53] * 2
    point = DraftProposal((0,), kinds=("passages",))
    model = DraftProposal((0,), np.array([[0, 1]]), np.array([[1.0, 0.0]], dtype=np.float32))
    for rule in RULES.values():
        for proposal in (point, model):
            assert rule(target, proposal, almost_one).token_ids == (0,)


# -- greedy, coupled, lossy --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.lists(st.integers(0, 2), max_size=4))
def test_greedy_keeps_the_common_prefix(target_ids: list[int], drafted: list[int]) -> None:
    drafted = drafted[: len(target_ids) - 1]
    verification = acceptance.verify_greedy(target_ids, DraftProposal(tuple(drafted)))
    common = next((i for i, t in enumerate(drafted) if t != target_ids[i]), len(drafted))
    assert verification.num_accepted == common
    assert verification.token_ids == tuple(target_ids[: common + 1])
    assert verification.last_kind == ("bonus" if common == len(drafted) else "recovered")
    assert len(verification.overlap) == min(common + 1, len(drafted))


@given(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.lists(st.integers(0, 2), max_size=3))
def test_coupled_says_the_targets_own_draws_whatever_is_proposed(
    drawn: list[int], drafted: list[int]
) -> None:
    rows = np.tile(TARGET, (len(drafted) + 1, 1))
    verification = acceptance.verify_coupled(drawn[: len(drafted) + 1], rows, DraftProposal(tuple(drafted)))
    assert verification.token_ids == tuple(drawn[: verification.num_accepted + 1])
    assert verification.overlap == tuple(TARGET[t] for t in drafted[: len(verification.overlap)])


def test_lossy_rules_are_not_exact() -> None:
    """They are opt-in and labelled: this is what the label means."""

    def threshold(target: Probs, proposal: DraftProposal, uniforms: Sequence[float]) -> Verification:
        return acceptance.verify_lossy(target, proposal, uniforms, 0.25, typical=False)

    target: Tables = [TARGET[None], np.tile(TARGET, (3, 1))]
    got, _ = exact(threshold, target, [DRAFT[None]], 1, length=1, propose=as_proposal)
    # 0 and 1 pass the bar of .25: kept as drafted; 2 does not, and is drawn again from the target.
    assert got[(1,)] == pytest.approx(0.5 + 0.2 * 0.3, abs=1e-12)
    assert abs(got[(1,)] - TARGET[1]) > 0.2


def test_typical_acceptance_lowers_the_bar_where_the_target_is_unsure() -> None:
    flat = np.full((2, 10), 0.1)
    proposal = DraftProposal((3,))
    assert acceptance.verify_lossy(flat, proposal, [0.5, 0.5], 0.3, typical=False).num_accepted == 0
    assert acceptance.verify_lossy(flat, proposal, [0.5, 0.5], 0.3, typical=True).num_accepted == 1
