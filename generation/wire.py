"""Draft messages as compact bytes: one each way per round and draft replica.

MessagePack around raw little-endian arrays. Supports travel as ``[k, m]`` uint32 ids and float32 probabilities:
exactly the numbers that were sampled from, so the rule of the wire holds to the last bit. A branch of five
tokens with m = 32 is 1.3 KB at temperature above 0 and a dozen bytes at 0 (``docs/architecture.md`` has sizes).

Decoding trusts nothing: whatever is not well-formed raises ``Garbled``, which callers count and drop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import msgpack
import numpy as np

from generation.types import (
    EMPTY_CAUSES,
    NO_PROPOSAL,
    DraftProposal,
    DraftRefusal,
    DraftReply,
    DraftRequest,
    LookaheadTable,
    PrefixMissing,
    SamplingParams,
)

VERSION = 1
_SENT_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "logit_bias", "seed")
_MAX_TOKENS = 1 << 20


class Garbled(ValueError):
    """Bytes that are no message of this protocol."""


def encode_requests(requests: Sequence[DraftRequest]) -> bytes:
    """A batch of requests; of the sampling only what the draft needs."""
    return _pack("requests", [_request_fields(request) for request in requests])


def decode_requests(data: bytes) -> list[DraftRequest]:
    """Raises ``Garbled``."""
    return [_guarded(_request, fields) for fields in _unpack("requests", data)]


def encode_replies(replies: Sequence[DraftReply]) -> bytes:
    """A batch of tables, missing prefixes and refusals."""
    return _pack("replies", [_reply_fields(reply) for reply in replies])


def decode_replies(data: bytes) -> tuple[list[DraftReply], int]:
    """``(replies, number dropped)``: a garbled reply harms only itself. Raises ``Garbled`` for the whole."""
    replies, num_dropped = [], 0
    for fields in _unpack("replies", data):
        try:
            replies.append(_guarded(_reply, fields))
        except Garbled:
            num_dropped += 1
    return replies, num_dropped


def _pack(kind: str, items: list[Any]) -> bytes:
    packed: bytes = msgpack.packb({"v": VERSION, "kind": kind, "items": items})
    return packed


def _unpack(kind: str, data: bytes) -> list[Any]:
    try:
        message = msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:  # msgpack raises many kinds, ValueError and its own among them
        raise Garbled("not a MessagePack message") from error
    if not isinstance(message, dict) or message.get("v") != VERSION or message.get("kind") != kind:
        raise Garbled(f"not a version {VERSION} message of {kind}")
    items = message.get("items")
    if not isinstance(items, list):
        raise Garbled("no list of items")
    return items


def _guarded(decode: Any, fields: Any) -> Any:
    try:
        return decode(fields)
    except Garbled:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise Garbled(f"malformed item: {error}") from error


def _request_fields(request: DraftRequest) -> dict[str, Any]:
    sampling = {name: value for name, value in asdict(request.sampling).items() if name in _SENT_SAMPLING}
    return {
        "id": request.request_id,
        "round": request.round_id,
        "length": request.confirmed_length,
        "new": _ids_bytes(request.new_token_ids),
        "k": request.num_draft_tokens,
        "budget": request.branch_budget,
        "sampling": sampling,
        "proposal": _ids_bytes(request.proposal.token_ids),
        "fanout": list(request.fanout),
        "reach": request.min_reach,
    }


def _request(fields: Any) -> DraftRequest:
    sampling = fields["sampling"]
    bias = {int(token_id): float(amount) for token_id, amount in sampling["logit_bias"].items()}
    # Without supports: the draft forwards the proposal's ids and needs nothing else of it.
    proposal = DraftProposal(_ids(fields["proposal"])) if fields["proposal"] else NO_PROPOSAL
    request = DraftRequest(
        request_id=_text(fields["id"]),
        round_id=_count(fields["round"]),
        confirmed_length=_count(fields["length"]),
        new_token_ids=_ids(fields["new"]),
        num_draft_tokens=_count(fields["k"]),
        branch_budget=_count(fields["budget"]),
        sampling=SamplingParams(**{**sampling, "logit_bias": bias}),
        proposal=proposal,
        fanout=tuple(_count(count) for count in fields["fanout"]),
        min_reach=float(fields["reach"]),
    )
    if not 0.0 <= request.min_reach <= 1.0:
        _refuse("a chance outside 0 to 1")
    if not 1 <= request.num_draft_tokens <= 64 or request.branch_budget > 256:
        _refuse("a proposal or table larger than the protocol allows")
    if len(request.new_token_ids) > request.confirmed_length:
        _refuse("more new ids than confirmed ones")
    return request


def _reply_fields(reply: DraftReply) -> dict[str, Any]:
    head = {"id": reply.request_id, "round": reply.round_id}
    if isinstance(reply, PrefixMissing):
        return {**head, "type": "missing", "have": reply.have_length}
    if isinstance(reply, DraftRefusal):
        return {**head, "type": "refusal", "cause": reply.cause}
    branches = [[*outcome, *_proposal_fields(proposal)] for outcome, proposal in reply.branches.items()]
    return {
        **head,
        "type": "table",
        "length": reply.confirmed_length,
        "branches": branches,
        "seconds": reply.draft_seconds,
    }


def _reply(fields: Any) -> DraftReply:
    request_id, round_id = _text(fields["id"]), _count(fields["round"])
    if fields["type"] == "missing":
        return PrefixMissing(request_id, round_id, _count(fields["have"]))
    if fields["type"] == "refusal":
        if fields["cause"] not in EMPTY_CAUSES:
            _refuse("an unknown cause")
        return DraftRefusal(request_id, round_id, fields["cause"])
    if fields["type"] != "table":
        _refuse("an unknown type")
    branches = {}
    for num_accepted, token_id, *proposal in fields["branches"]:
        branches[_count(num_accepted), int(token_id)] = _proposal(proposal)
    seconds = float(fields["seconds"])
    if not 0.0 <= seconds < 1e6:
        _refuse("an impossible time")
    return LookaheadTable(request_id, round_id, _count(fields["length"]), branches, seconds)


def _proposal_fields(proposal: DraftProposal) -> list[Any]:
    if proposal.support_ids is None or proposal.support_probs is None:
        return [_ids_bytes(proposal.token_ids)]
    ids = np.ascontiguousarray(proposal.support_ids, dtype="<u4").tobytes()
    probs = np.ascontiguousarray(proposal.support_probs, dtype="<f4").tobytes()
    return [_ids_bytes(proposal.token_ids), proposal.support_ids.shape[1], ids, probs]


def _proposal(fields: Sequence[Any]) -> DraftProposal:
    token_ids = _ids(fields[0])
    if len(fields) == 1:
        return DraftProposal(token_ids)
    shape = (len(token_ids), _count(fields[1]))
    ids = np.frombuffer(fields[2], dtype="<u4").reshape(shape).astype(np.int64)
    probs = np.frombuffer(fields[3], dtype="<f4").reshape(shape).astype(np.float32)
    if not np.isfinite(probs).all() or (probs < 0).any() or (abs(probs.sum(axis=1) - 1.0) > 1e-3).any():
        _refuse("probabilities that are none")
    for row, token_id in enumerate(token_ids):
        if len(set(ids[row].tolist())) != shape[1] or not probs[row][ids[row] == token_id].sum() > 0.0:
            _refuse("a draft token outside its own support")
    return DraftProposal(token_ids, ids, probs)


def _ids_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def _ids(data: bytes) -> tuple[int, ...]:
    if not isinstance(data, bytes) or len(data) > 4 * _MAX_TOKENS:
        _refuse("ids that are no bytes")
    return tuple(np.frombuffer(data, dtype="<u4").tolist())


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        _refuse("a number that is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 256:
        _refuse("an id that is no text")
    return value


def _refuse(what: str) -> NoReturn:
    raise Garbled(what)


def usable(reply: DraftReply, vocab_size: int) -> bool:
    """Whether every id of a reply lies inside the target's vocabulary."""
    if not isinstance(reply, LookaheadTable):
        return True
    branches: Mapping[Any, DraftProposal] = reply.branches
    for proposal in branches.values():
        if any(token_id >= vocab_size for token_id in proposal.token_ids):
            return False
        if proposal.support_ids is not None and (proposal.support_ids >= vocab_size).any():
            return False
    return True
