"""Messages between draft and target: nothing lost, nothing trusted."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.drafters.link import ReplyBox
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
from generation.wire import (
    Garbled,
    decode_replies,
    decode_requests,
    encode_replies,
    encode_requests,
    usable,
)


def sampled_proposal(k: int, m: int, seed: int = 0) -> DraftProposal:
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.choice(49152, m, replace=False) for _ in range(k)]).astype(np.int64)
    probs = generator.dirichlet(np.ones(m), size=k).astype(np.float32)
    return DraftProposal(tuple(int(row[0]) for row in ids), ids, probs)


def table(num_branches: int = 8, k: int = 5, m: int | None = 32, round_id: int = 3) -> LookaheadTable:
    branches = {
        (number % 3, number): sampled_proposal(k, m, number) if m else DraftProposal(tuple(range(k)))
        for number in range(num_branches)
    }
    return LookaheadTable("a", round_id, 40, branches, 0.02)


def same_proposal(left: DraftProposal, right: DraftProposal) -> bool:
    same_ids = left.token_ids == right.token_ids
    if left.support_ids is None or right.support_ids is None:
        return same_ids and left.support_ids is right.support_ids
    assert left.support_probs is not None
    assert right.support_probs is not None
    same_supports = np.array_equal(left.support_ids, right.support_ids)
    return same_ids and same_supports and np.array_equal(left.support_probs, right.support_probs)


def test_probabilities_arrive_to_the_last_bit() -> None:
    sent = table()
    (got,), num_dropped = decode_replies(encode_replies([sent]))
    assert num_dropped == 0
    assert isinstance(got, LookaheadTable)
    assert got.branches.keys() == sent.branches.keys()
    assert all(same_proposal(got.branches[outcome], sent.branches[outcome]) for outcome in sent.branches)


def test_sizes_are_what_the_documentation_says() -> None:
    sampled, greedy = len(encode_replies([table()])), len(encode_replies([table(m=None)]))
    assert 10_000 < sampled < 12_000
    assert 250 < greedy < 500


def test_requests_arrive_with_what_a_draft_needs() -> None:
    sampling = SamplingParams(
        temperature=0.7, top_p=0.9, logit_bias={5: -2.0}, seed=11, stop=("\n",), max_tokens=9
    )
    sent = DraftRequest("a", 2, 30, (1, 2, 3), 5, 8, sampling, DraftProposal((7, 8)), (2, 1, 1))
    (got,) = decode_requests(encode_requests([sent]))
    assert (got.request_id, got.round_id, got.confirmed_length) == ("a", 2, 30)
    assert (got.new_token_ids, got.proposal.token_ids, got.fanout) == ((1, 2, 3), (7, 8), (2, 1, 1))
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.seed) == (0.7, 0.9, 11)
    assert got.sampling.logit_bias == {5: -2.0}
    assert got.sampling.stop == ()


def test_missing_prefixes_and_refusals_arrive() -> None:
    sent: list[DraftReply] = [PrefixMissing("a", 1, 17), DraftRefusal("b", 2, "overloaded")]
    assert decode_replies(encode_replies(sent)) == (sent, 0)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_garbled_and_nothing_else(data: bytes) -> None:
    for decode in (decode_requests, decode_replies):
        with pytest.raises(Garbled):
            decode(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_flipped_byte_never_escapes_as_another_error(place: int, value: int) -> None:
    data = bytearray(encode_replies([table(num_branches=2), PrefixMissing("b", 1, 3)]))
    data[place % len(data)] = value
    try:
        replies, num_dropped = decode_replies(bytes(data))
    except Garbled:
        return
    assert len(replies) + num_dropped <= 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids, probs: (ids, probs * np.nan),
        lambda ids, probs: (ids, -probs),
        lambda ids, probs: (ids, probs * 2),
        lambda ids, probs: (ids + 1_000, probs),
        lambda ids, probs: (np.zeros_like(ids), probs),
    ],
    ids=["nan", "negative", "not summing to one", "token outside", "duplicate ids"],
)
def test_spoilt_supports_harm_only_their_own_reply(spoil: object) -> None:
    good = table(num_branches=1)
    proposal = good.branches[0, 0]
    ids, probs = spoil(proposal.support_ids, proposal.support_probs)  # type: ignore[operator]
    bad = LookaheadTable("b", 3, 40, {(0, 0): DraftProposal(proposal.token_ids, ids, probs)})
    replies, num_dropped = decode_replies(encode_replies([good, bad]))
    assert [reply.request_id for reply in replies] == ["a"]
    assert num_dropped == 1


def test_another_version_is_refused() -> None:
    message = msgpack.unpackb(encode_replies([]))
    with pytest.raises(Garbled, match="version"):
        decode_replies(msgpack.packb({**message, "v": 99}))


def test_ids_beyond_the_vocabulary_are_unusable() -> None:
    assert usable(table(), 49152)
    assert not usable(table(), 100)
    assert usable(PrefixMissing("a", 1, 2), 100)


def request(round_id: int, length: int = 40) -> DraftRequest:
    return DraftRequest("a", round_id, length, (), 5, 8, SamplingParams(), NO_PROPOSAL)


def test_only_the_awaited_round_is_let_in() -> None:
    box = ReplyBox()
    box.expect([request(3)])
    box.put([table(round_id=2), LookaheadTable("a", 3, 39, {}), LookaheadTable("stranger", 3, 40, {})])
    assert box.take([("a", 3)], 0.0) == {}
    assert box.num_dropped == 3
    right = LookaheadTable("a", 3, 40, {NOW: NO_PROPOSAL})
    box.put([right, right])
    assert box.num_dropped == 4
    assert box.take([("a", 3)], 0.0) == {"a": right}
    box.put([right])
    assert box.num_dropped == 5


def test_a_late_reply_does_not_answer_the_next_round() -> None:
    box = ReplyBox()
    box.expect([request(3)])
    assert box.take([("a", 3)], 0.0) == {}
    box.expect([request(4, 42)])
    box.put([table(round_id=3)])
    assert box.take([("a", 4)], 0.0) == {}
    assert box.num_dropped == 1
