"""One proposal a round for every sequence: copied, prepared, asked for, or none.

The proposer knows who may propose (the sequence's own passages, past answers, the draft model over a link) and
picks what promises most accepted tokens. Exactness never depends on its choices, only speed does: it chooses
by what it knows before the round, not by the tokens' fate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from generation.config import SpeculationConfig
from generation.controller import Controller, Decision, ModelMode, expected_accepted
from generation.drafters.link import DraftLink
from generation.drafters.model import now_proposal
from generation.drafters.passages import HistoryStore, Match, MatchAcceptance, PassageDrafter
from generation.lookahead import BranchBudget, OutcomeModel, fan_out, look_up
from generation.sequence import Sequence
from generation.types import (
    NO_PROPOSAL,
    DraftProposal,
    DraftReply,
    DraftRequest,
    LookaheadTable,
    PrefixMissing,
    Verification,
)

_NO_TIME = 30.0
"""Seconds a colocated draft may take: it computes on the caller's thread, so there is nothing to wait for."""


@dataclass(slots=True)
class _Track:
    """What the proposer remembers of one sequence."""

    passages: PassageDrafter | None
    decision: Decision = field(default_factory=lambda: Decision("off", 0))
    num_sent: int = 0
    """Ids the draft is believed to hold."""
    table_round: int | None = None
    last: Verification | None = None
    match: Match | None = None
    text: str = ""
    asked_at: float = 0.0


class Proposer:
    """Owns the drafters. ``colocated`` runs in this process, ``remote`` beside it; either may be absent."""

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        colocated: DraftLink | None = None,
        remote: DraftLink | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self._clock = clock
        self._colocated = colocated
        self._remote = remote
        self._history = HistoryStore(config.history_tokens) if config.history else None
        self._match_acceptance = MatchAcceptance()
        self._tracks: dict[str, _Track] = {}
        self.budget = BranchBudget(config.branch_budget)
        self.outcomes = OutcomeModel()
        modes: list[ModelMode] = ["off"]
        if colocated is not None:
            modes.append("colocated")
        if remote is not None:
            modes += ["synchronous", "lookahead"] if remote.is_remote else ["synchronous"]
        self.controller = Controller(
            max_draft_tokens=config.num_draft_tokens,
            modes=tuple(modes),
            exploration_rate=config.exploration_rate,
            adaptive_length=config.adaptive_length,
            seed=seed,
        )
        self.lookahead_hits = 0
        self.lookahead_misses = 0
        self._table_seconds: float | None = None

    # -- the life of a sequence -----------------------------------------------------------------------

    def start(self, sequence: Sequence) -> None:
        """Index the prompt and, when look-ahead is on, let the draft prefill beside the target."""
        request = sequence.request
        use_copies = self.config.passages and self._mode_of(sequence) != "off"
        passages = (
            PassageDrafter(request.prompt_ids, request.passage_ids, self.config.passages_min_match)
            if use_copies
            else None
        )
        self._tracks[request.request_id] = _Track(passages)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence; its answer becomes history of its tenant and domain."""
        track = self._tracks.pop(sequence.request_id, None)
        if track is None:
            return
        for link in (self._colocated, self._remote):
            if link is not None:
                link.forget((sequence.request_id,))
        if self._history is not None and sequence.finish_reason in ("stop", "length"):
            history = self._history.get(sequence.request.tenant, sequence.request.domain)
            history.add(sequence.token_ids[sequence.num_prompt_tokens :])

    # -- a round --------------------------------------------------------------------------------------

    def decide(self, sequences: Seq[Sequence]) -> None:
        """Fix mode and K of this round for each sequence."""
        remote_open = self._remote is not None and self._remote.is_open
        chosen: dict[str, Decision] = {}
        for sequence in sequences:
            mode, domain = self._mode_of(sequence), sequence.request.domain
            if mode == "auto" and domain not in chosen:
                # Once a domain and round: a batch that mixed modes would wait for the slowest of them.
                chosen[domain] = self.controller.decide(domain, len(sequences), draft_open=remote_open)
            track = self._tracks[sequence.request_id]
            track.decision = chosen[domain] if mode == "auto" else self._fixed(mode, remote_open)

    def propose(self, sequences: Seq[Sequence], step_seconds: float) -> list[DraftProposal]:
        """One proposal each, in order; empty ones say why. Waits at most a few measured steps in all."""
        deadline = max(0.005, self.config.deadline_multiple * step_seconds)
        tables = self._collect(sequences, deadline)
        proposals: dict[str, DraftProposal] = {}
        to_ask: list[Sequence] = []
        for sequence in sequences:
            track = self._tracks[sequence.request_id]
            room = min(self.config.num_draft_tokens, sequence.num_remaining - 1)
            track.match = None
            if room <= 0 or self._mode_of(sequence) == "off":
                proposals[sequence.request_id] = NO_PROPOSAL
                continue
            prepared = self._from_table(sequence, track, tables.get(sequence.request_id))
            match = self._best_match(sequence, track, room, len(sequences))
            k = min(track.decision.num_draft_tokens, room)
            asks = k > 0 and self._asks_now(track, prepared)
            ready = prepared is not None and len(prepared) > 0
            comes = "lookahead" if ready else _asked_as(track.decision.mode) if asks else None
            if match is not None and self._beats_model(match, sequence, comes, max(1, k), len(sequences)):
                track.match = match
                proposals[sequence.request_id] = match.proposal()
            elif prepared is not None and ready:
                proposals[sequence.request_id] = _first(prepared, room)
            elif asks:
                to_ask.append(sequence)
            else:
                # Empty, it is falsy, and still says why: a miss is no "off".
                proposals[sequence.request_id] = NO_PROPOSAL if prepared is None else prepared
        proposals.update(self._ask(to_ask, deadline))
        return [proposals[sequence.request_id] for sequence in sequences]

    def prepare(self, sequences: Seq[Sequence], proposals: Seq[DraftProposal]) -> None:
        """Before the target verifies: ask the remote draft for the table of every outcome that is likely."""
        if self._remote is None or not self._remote.is_open:
            return
        requests = []
        for sequence, proposal in zip(sequences, proposals, strict=True):
            track = self._tracks[sequence.request_id]
            if track.decision.mode != "lookahead" or sequence.num_remaining <= len(proposal) + 1:
                continue
            k = max(1, min(track.decision.num_draft_tokens, sequence.num_remaining - 1))
            branches = self.budget.branches
            fanout: tuple[int, ...] = ()  # the draft knows best how sure it is of its own tokens
            if track.match is not None:
                fanout = fan_out(len(proposal), branches, self.outcomes.alpha, self.outcomes.r)
            reach = self.controller.min_reach("lookahead", sequence.request.domain, len(sequences))
            requests.append(self._request(sequence, track, k, branches, proposal, fanout, reach))
            track.table_round = sequence.round_id
        if requests:
            self._remote.send(requests)

    def committed(
        self, sequence: Sequence, proposal: DraftProposal, verification: Verification, *, ended: bool
    ) -> None:
        """Learn from a round and note what the table must be looked up by."""
        track = self._tracks.get(sequence.request_id)
        if track is None:
            return
        track.last = verification
        if track.passages is not None:
            track.passages.extend(verification.token_ids)
        if not len(proposal) or ended:
            return
        rejected = int(verification.last_kind == "recovered")
        num_tested = verification.num_accepted + rejected
        if track.match is not None:
            self.outcomes.update(verification.num_accepted, num_tested)
            self._match_acceptance.update(track.match.match_length, verification.num_accepted, num_tested)
        elif num_tested:
            overlaps = verification.overlap[:num_tested]
            self.controller.observe_round(sequence.request.domain, sum(overlaps), len(overlaps))
            self.controller.observe_length(sequence.request.domain, len(proposal), verification.num_accepted)

    def observe_verification(self, seconds: float) -> None:
        """Tables should take as long as a verification: more branches fit, or fewer."""
        if self._table_seconds is not None:
            self.budget.update(self._table_seconds, seconds)
            self._table_seconds = None

    # -- parts ----------------------------------------------------------------------------------------

    def _mode_of(self, sequence: Sequence) -> str:
        return sequence.request.mode or self.config.mode

    def _fixed(self, mode: str, remote_open: bool) -> Decision:
        k = self.config.num_draft_tokens
        if mode == "colocated" and self._colocated is not None:
            return Decision("colocated", k)
        if mode == "synchronous" and remote_open:
            return Decision("synchronous", k)
        if mode == "lookahead" and remote_open:
            return Decision("lookahead", k, sync_on_miss=False)
        return Decision("off", 0)

    def _collect(self, sequences: Seq[Sequence], deadline: float) -> dict[str, DraftReply]:
        if self._remote is None:
            return {}
        keys = []
        for sequence in sequences:
            track = self._tracks[sequence.request_id]
            if track.table_round is not None:
                keys.append((sequence.request_id, track.table_round))
        if not keys:
            return {}
        began = self._clock()
        replies = self._remote.receive(keys, deadline)
        waited = self._clock() - began
        self.controller.table_wait.update(waited)
        for sequence in sequences:
            if (sequence.request_id, self._tracks[sequence.request_id].table_round) in keys:
                sequence.stats.waited_draft_seconds += waited
        return replies

    def _from_table(
        self, sequence: Sequence, track: _Track, reply: DraftReply | None
    ) -> DraftProposal | None:
        """The prepared proposal; an empty one with its cause; or None when nothing was prepared."""
        asked, track.table_round = track.table_round, None
        if asked is None:
            if track.decision.mode == "off" and self._remote is not None and not self._remote.is_open:
                return DraftProposal(empty_cause="draft_down")
            return None
        if reply is None:
            return DraftProposal(empty_cause="timeout")
        if isinstance(reply, PrefixMissing):
            track.num_sent = reply.have_length
            return DraftProposal(empty_cause="miss")
        if not isinstance(reply, LookaheadTable):
            return DraftProposal(empty_cause=reply.cause)
        found = look_up(reply, track.last) if track.last is not None else None
        plain = track.last is not None and track.last.num_accepted == 0 and track.last.last_kind == "bonus"
        self.controller.observe_table(found is not None, after_plain=plain)
        sequence.stats.hidden_draft_seconds += reply.draft_seconds
        self._table_seconds = max(self._table_seconds or 0.0, reply.draft_seconds)
        if found is None:
            self.lookahead_misses += 1
            sequence.stats.lookahead_misses += 1
            return DraftProposal(empty_cause="miss")
        self.lookahead_hits += 1
        sequence.stats.lookahead_hits += 1
        return found

    def _best_match(self, sequence: Sequence, track: _Track, room: int, batch_size: int) -> Match | None:
        """The longest match, as long as its tokens are worth the rows they take in the verification."""
        if track.passages is None:
            return None
        match = track.passages.match((), room)
        if self._history is not None:
            history = self._history.get(sequence.request.tenant, sequence.request.domain)
            past = history.match(sequence.token_ids, room)
            if past is not None and (match is None or past.match_length > match.match_length):
                match = past
        if match is None:
            return None
        reach = self.controller.min_reach("lookahead", sequence.request.domain, batch_size)
        rate, length = self._match_acceptance.rate(match.match_length), 1
        while length < len(match.token_ids) and rate ** (length + 1) >= reach:
            length += 1
        return replace(match, token_ids=match.token_ids[:length])

    def _beats_model(
        self, match: Match, sequence: Sequence, comes: ModelMode | None, k: int, batch_size: int
    ) -> bool:
        """Does copying, which costs no drafting, promise more tokens a second than the draft model?

        ``comes``: how the model's proposal does (``lookahead``: it is here already); None: it doesn't.
        """
        if comes is None:
            return True
        domain = sequence.request.domain
        alpha = self.controller.alpha(domain)
        rate, length = self._match_acceptance.rate(match.match_length), len(match.token_ids)
        copied = self.controller.round_rate(length, expected_accepted(rate, length), batch_size)
        return copied >= self.controller.model_round_rate(comes, k, alpha, batch_size, domain)

    @staticmethod
    def _asks_now(track: _Track, prepared: DraftProposal | None) -> bool:
        if track.decision.mode in ("colocated", "synchronous"):
            return True
        missed = prepared is not None and prepared.empty_cause == "miss"
        return track.decision.mode == "lookahead" and track.decision.sync_on_miss and missed

    def _ask(self, sequences: Seq[Sequence], deadline: float) -> dict[str, DraftProposal]:
        """Synchronous proposals, one message a link; a draft that lacks a prefix is sent it once more."""
        proposals: dict[str, DraftProposal] = {}
        for link, seconds in ((self._colocated, _NO_TIME), (self._remote, deadline)):
            group = [
                s
                for s in sequences
                if (self._tracks[s.request_id].decision.mode == "colocated") == (link is self._colocated)
            ]
            if link is None or not group:
                continue
            began = self._clock()
            replies = self._exchange(link, group, seconds)
            missing = [s for s in group if isinstance(replies.get(s.request_id), PrefixMissing)]
            if missing:
                for sequence in missing:
                    reply = replies[sequence.request_id]
                    assert isinstance(reply, PrefixMissing)
                    self._tracks[sequence.request_id].num_sent = reply.have_length
                left = seconds - (self._clock() - began)
                replies.update(self._exchange(link, missing, max(0.001, left)))
            waited = self._clock() - began
            self._learn_sync(group, replies, waited)
            for sequence in group:
                sequence.stats.waited_draft_seconds += waited
                asked = now_proposal(replies.get(sequence.request_id), "timeout")
                # A draft that says more than it was asked must not write beyond the slot.
                proposals[sequence.request_id] = _first(asked, sequence.num_remaining - 1)
        for sequence in sequences:
            proposals.setdefault(sequence.request_id, DraftProposal(empty_cause="draft_down"))
        return proposals

    def _exchange(self, link: DraftLink, group: Seq[Sequence], seconds: float) -> dict[str, DraftReply]:
        requests = []
        for sequence in group:
            track = self._tracks[sequence.request_id]
            k = min(track.decision.num_draft_tokens, sequence.num_remaining - 1)
            domain = sequence.request.domain
            reach = self.controller.min_reach(track.decision.mode, domain, len(group))
            requests.append(self._request(sequence, track, k, 0, NO_PROPOSAL, (), reach))
        link.send(requests)
        return link.receive([(request.request_id, request.round_id) for request in requests], seconds)

    def _learn_sync(self, group: Seq[Sequence], replies: dict[str, DraftReply], waited: float) -> None:
        tables = [reply for reply in replies.values() if isinstance(reply, LookaheadTable)]
        if not tables:
            return
        drafted = max(reply.draft_seconds for reply in tables)
        steps = max(len(branch) for reply in tables for branch in reply.branches.values())
        self.controller.draft_step.update(drafted / max(1, steps))
        self.controller.sync_overhead.update(max(0.0, waited - drafted))

    def _request(
        self,
        sequence: Sequence,
        track: _Track,
        k: int,
        branches: int,
        proposal: DraftProposal,
        fanout: tuple[int, ...],
        min_reach: float,
    ) -> DraftRequest:
        confirmed = len(sequence.token_ids)
        new_ids = tuple(sequence.token_ids[track.num_sent :])
        track.num_sent = confirmed
        return DraftRequest(
            sequence.request_id,
            sequence.round_id,
            confirmed,
            new_ids,
            k,
            branches,
            sequence.sampling,
            proposal,
            fanout,
            min_reach,
        )


def _asked_as(mode: ModelMode) -> ModelMode:
    """How a draft is asked for a proposal now: after a look-ahead miss, as in synchronous mode."""
    return "synchronous" if mode == "lookahead" else mode


def _first(proposal: DraftProposal, k: int) -> DraftProposal:
    """The first k tokens of a proposal."""
    if len(proposal) <= k:
        return proposal
    ids, probs = proposal.support_ids, proposal.support_probs
    return DraftProposal(
        proposal.token_ids[:k],
        ids[:k] if ids is not None else None,
        probs[:k] if probs is not None else None,
        proposal.kinds[:k],
    )
