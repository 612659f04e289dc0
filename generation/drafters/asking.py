"""Asking a draft for proposals and waiting for them: one message a link, a lost prefix is sent again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from generation.controller import Controller
from generation.drafters.link import DraftLink
from generation.drafters.model import now_proposal
from generation.drafters.track import Track
from generation.sequence import Sequence
from generation.types import DraftProposal, DraftReply, LookaheadTable, PrefixMissing

_NO_TIME = 30.0
"""Seconds a colocated draft may take: it computes on the caller's thread, so there is nothing to wait for."""


class Asking:
    """Synchronous proposals from the colocated and the remote draft; measures what asking costs."""

    def __init__(
        self,
        controller: Controller,
        colocated: DraftLink | None,
        remote: DraftLink | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._controller = controller
        self._colocated = colocated
        self._remote = remote
        self._clock = clock

    def ask(
        self, sequences: Seq[Sequence], tracks: Mapping[str, Track], deadline: float
    ) -> dict[str, DraftProposal]:
        """One proposal each, by request id; an empty one says why."""
        proposals: dict[str, DraftProposal] = {}
        for link, seconds in ((self._colocated, _NO_TIME), (self._remote, deadline)):
            group = [
                s
                for s in sequences
                if (tracks[s.request_id].decision.mode == "colocated") == (link is self._colocated)
            ]
            if link is None or not group:
                continue
            replies, waited = self._exchange_twice(link, group, tracks, seconds)
            self._learn(replies, waited)
            for sequence in group:
                sequence.stats.waited_draft_seconds += waited
                asked = now_proposal(replies.get(sequence.request_id), "timeout")
                # A draft that says more than it was asked must not write beyond the slot.
                proposals[sequence.request_id] = asked.first(sequence.num_remaining - 1)
        for sequence in sequences:
            proposals.setdefault(sequence.request_id, DraftProposal(empty_cause="draft_down"))
        return proposals

    def _exchange_twice(
        self, link: DraftLink, group: Seq[Sequence], tracks: Mapping[str, Track], seconds: float
    ) -> tuple[dict[str, DraftReply], float]:
        """Replies and the time they took; a draft that lacks a prefix is sent it once more."""
        began = self._clock()
        replies = self._exchange(link, group, tracks, seconds)
        missing = []
        for sequence in group:
            reply = replies.get(sequence.request_id)
            if isinstance(reply, PrefixMissing):
                tracks[sequence.request_id].num_sent = reply.have_length
                missing.append(sequence)
        if missing:
            left = seconds - (self._clock() - began)
            replies.update(self._exchange(link, missing, tracks, max(0.001, left)))
        return replies, self._clock() - began

    def _exchange(
        self, link: DraftLink, group: Seq[Sequence], tracks: Mapping[str, Track], seconds: float
    ) -> dict[str, DraftReply]:
        requests = []
        for sequence in group:
            track = tracks[sequence.request_id]
            k = min(track.decision.num_draft_tokens, sequence.num_remaining - 1)
            reach = self._controller.min_reach(track.decision.mode, sequence.request.domain, len(group))
            requests.append(track.request(sequence, k, reach))
        link.send(requests)
        return link.receive([(request.request_id, request.round_id) for request in requests], seconds)

    def _learn(self, replies: Mapping[str, DraftReply], waited: float) -> None:
        tables = [reply for reply in replies.values() if isinstance(reply, LookaheadTable)]
        if not tables:
            return
        drafted = max(reply.draft_seconds for reply in tables)
        steps = max(len(branch) for reply in tables for branch in reply.branches.values())
        self._controller.draft_step.update(drafted / max(1, steps))
        self._controller.sync_overhead.update(max(0.0, waited - drafted))
