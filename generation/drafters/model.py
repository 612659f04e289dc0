"""The draft model's side: it keeps each sequence's keys, and answers with proposals or look-ahead tables.

The length a sequence has confirmed is the truth. The draft forwards what it lacks of (confirmed + proposal)
in place, then grows all branches of all sequences together, one token a forward pass: a branch's keys go to
scratch rows beyond the text and a mask shows each branch its own prefix. The next request overwrites them;
there is no roll-back code.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from generation.attention import Segment
from generation.drafters.branches import Branch, plan_branches
from generation.drafters.draws import DraftSampler
from generation.model_runner import LoadedModel, ModelRunner
from generation.types import (
    NOW,
    DraftProposal,
    DraftRefusal,
    DraftReply,
    DraftRequest,
    LookaheadTable,
    Outcome,
    PrefixMissing,
)

_PREFILL_CHUNK = 512


@dataclass(slots=True)
class _Held:
    """What the draft holds of one sequence: confirmed ids, and the ids whose keys lie in the slot."""

    slot: int
    token_ids: list[int] = field(default_factory=list)
    in_slot: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """One request of a batch on its way."""

    request: DraftRequest
    held: _Held
    sampler: DraftSampler
    branches: list[Branch] = field(default_factory=list)
    next_row: int = 0
    """The first free row beyond the text: branches' keys go there."""


class DraftWorker:
    """Runs a draft model for many sequences. Not thread-safe: one worker thread owns it."""

    def __init__(
        self, model: LoadedModel, *, num_slots: int, slot_length: int, support_size: int = 32
    ) -> None:
        self.model = model
        self.runner = ModelRunner(model, num_slots, slot_length)
        self._support_size = support_size
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self.num_evictions = 0
        self.step_seconds = 0.0
        """Running mean of one draft step: what the controller calls t_d."""

    @property
    def num_sequences(self) -> int:
        return len(self._held)

    def forget(self, request_ids: Seq[str]) -> None:
        """Free what finished sequences hold. Unknown ids are fine."""
        for request_id in request_ids:
            held = self._held.pop(request_id, None)
            if held is not None:
                self.runner.pool.free(held.slot)

    def answer(self, requests: Seq[DraftRequest]) -> list[DraftReply]:
        """One reply a request, in order. A bad request is refused alone."""
        began = time.perf_counter()
        replies: list[DraftReply | None] = [None] * len(requests)
        jobs: dict[int, _Job] = {}
        busy = {request.request_id for request in requests}
        for index, request in enumerate(requests):
            opened = self._open(request, busy)
            if isinstance(opened, _Job):
                jobs[index] = opened
            else:
                replies[index] = opened
        if jobs:
            self._forward_texts(list(jobs.values()))
            self._grow(list(jobs.values()))
        seconds = time.perf_counter() - began
        for index, job in jobs.items():
            if not all(np.isfinite(row).all() for branch in job.branches for row in branch.probs):
                request = job.request
                replies[index] = DraftRefusal(request.request_id, request.round_id, "draft_down")
                continue
            branches = {branch.outcome: branch.proposal() for branch in job.branches}
            request = job.request
            replies[index] = LookaheadTable(
                request.request_id, request.round_id, request.confirmed_length, branches, seconds
            )
        return [reply for reply in replies if reply is not None]

    def _open(self, request: DraftRequest, busy: set[str]) -> _Job | DraftReply:
        """Bring the confirmed ids up to date, or say why that cannot be done."""
        known = request.confirmed_length - len(request.new_token_ids)
        held = self._held.get(request.request_id)
        have = len(held.token_ids) if held is not None else 0
        if known > have:
            return PrefixMissing(request.request_id, request.round_id, have)
        if not self._fits(request):
            return DraftRefusal(request.request_id, request.round_id, "overloaded")
        if held is None:
            slot = self._take_slot(busy)
            if slot is None:
                return DraftRefusal(request.request_id, request.round_id, "overloaded")
            held = self._held[request.request_id] = _Held(slot)
        self._held.move_to_end(request.request_id)
        held.token_ids[known:] = request.new_token_ids
        sampler = DraftSampler(request, self.model, self._support_size)
        return _Job(request, held, sampler)

    def _fits(self, request: DraftRequest) -> bool:
        scratch = max(1, request.branch_budget) * request.num_draft_tokens
        need = request.confirmed_length + len(request.proposal) + scratch
        limit = min(self.runner.pool.slot_length, self.model.context_length + scratch)
        ids = (*request.new_token_ids, *request.proposal.token_ids)
        sane = request.confirmed_length > 0 and all(0 <= token_id < self.model.vocab_size for token_id in ids)
        return sane and need <= limit

    def _take_slot(self, busy: set[str]) -> int | None:
        slot = self.runner.pool.allocate()
        if slot is not None:
            return slot
        for request_id in self._held:
            if request_id not in busy:
                self.num_evictions += 1
                self.forget((request_id,))
                return self.runner.pool.allocate()
        return None

    def _forward_texts(self, jobs: list[_Job]) -> None:
        """Compute what is missing of confirmed ids and proposal, and open the branches from its logits."""
        segments: list[Segment] = []
        rows: list[int] = []
        spans: list[int] = []
        row = 0
        for job in jobs:
            held, request = job.held, job.request
            text = [*held.token_ids, *request.proposal.token_ids]
            shared = _common_length(held.in_slot, text)
            start = min(shared, request.confirmed_length - 1)
            while len(text) - start > _PREFILL_CHUNK:
                piece = text[start : start + _PREFILL_CHUNK]
                self.runner.forward([Segment(held.slot, start, piece)], [])
                start += len(piece)
            held.in_slot = text
            job.next_row = len(text)
            segments.append(Segment(held.slot, start, text[start:]))
            first = row + request.confirmed_length - 1 - start
            row += len(text) - start
            rows.extend(range(first, row))
            spans.append(row - first)
        logits = self.runner.forward(segments, rows)
        for job, chunk in zip(jobs, torch.split(logits, spans), strict=True):
            job.branches = plan_branches(job.request, job.sampler, chunk)

    def _grow(self, jobs: list[_Job]) -> None:
        """Extend every branch of every sequence until it is long or unsure enough, one token a pass."""
        while True:
            segments, live = [], []
            for job in jobs:
                growing = [branch for branch in job.branches if branch.grows(job.request)]
                if growing:
                    live.append((job, growing))
                    segments.append(_tree_segment(job, growing))
            if not segments:
                return
            began = time.perf_counter()
            logits = self.runner.forward(segments, range(sum(segment.width for segment in segments)))
            start = 0
            for job, growing in live:
                job.sampler.extend(growing, logits[start : start + len(growing)])
                start += len(growing)
            seconds = time.perf_counter() - began
            self.step_seconds = 0.9 * self.step_seconds + 0.1 * seconds if self.step_seconds else seconds


def _tree_segment(job: _Job, growing: list[Branch]) -> Segment:
    """The branches' latest tokens as rows: each sees its prefix of the text and its own earlier rows."""
    start, count = job.next_row, len(growing)
    job.next_row += count
    visible = torch.zeros(count, start + count, dtype=torch.bool)
    positions = []
    for number, branch in enumerate(growing):
        prefix = job.request.confirmed_length + branch.num_accepted
        positions.append(prefix + len(branch.rows))
        branch.rows.append(start + number)
        visible[number, :prefix] = True
        visible[number, branch.rows] = True
    return Segment(job.held.slot, start, [branch.last_token_id for branch in growing], positions, visible)


def _common_length(left: Seq[int], right: Seq[int]) -> int:
    length = min(len(left), len(right))
    for index in range(length):
        if left[index] != right[index]:
            return index
    return length


def now_proposal(reply: DraftReply | None, cause: str) -> DraftProposal:
    """The proposal of a synchronous reply, or an empty one with its cause."""
    if isinstance(reply, LookaheadTable):
        found: Outcome = NOW
        return reply.branches.get(found, DraftProposal(empty_cause="miss"))
    if isinstance(reply, DraftRefusal):
        return DraftProposal(empty_cause=reply.cause)
    return DraftProposal(empty_cause="miss" if isinstance(reply, PrefixMissing) else cause)
