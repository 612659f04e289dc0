"""One proposal a round for every sequence: copied, prepared, asked for, or none.

The proposer knows who may propose (the sequence's own passages, past answers, the draft model over a link) and
picks what promises most accepted tokens. Exactness never depends on its choices, only speed does: it chooses
by what it knows before the round, not by the tokens' fate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from generation.config import SpeculationConfig
from generation.controller import Controller, Decision, ModelMode
from generation.drafters.asking import Asking
from generation.drafters.copies import Copies
from generation.drafters.link import DraftLink
from generation.drafters.track import Track
from generation.lookahead import BranchBudget, OutcomeModel, fan_out, look_up
from generation.sequence import Sequence
from generation.types import (
    NO_PROPOSAL,
    DraftProposal,
    DraftReply,
    LookaheadTable,
    PrefixMissing,
    Verification,
)


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
        self._tracks: dict[str, Track] = {}
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
        self._copies = Copies(config, self.controller)
        self._asking = Asking(self.controller, colocated, remote, clock)
        self.lookahead_hits = 0
        self.lookahead_misses = 0
        self._table_seconds: float | None = None

    # -- the life of a sequence -----------------------------------------------------------------------

    def start(self, sequence: Sequence) -> None:
        """Index the prompt and, when look-ahead is on, let the draft prefill beside the target."""
        use_copies = self.config.passages and self._mode_of(sequence) != "off"
        self._tracks[sequence.request_id] = Track(self._copies.index(sequence) if use_copies else None)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence; its answer becomes history of its tenant and domain."""
        track = self._tracks.pop(sequence.request_id, None)
        if track is None:
            return
        for link in (self._colocated, self._remote):
            if link is not None:
                link.forget((sequence.request_id,))
        self._copies.remember(sequence)

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
            match = self._copies.best(sequence, track, room, len(sequences))
            k = min(track.decision.num_draft_tokens, room)
            asks = k > 0 and self._asks_now(track, prepared)
            ready = prepared is not None and len(prepared) > 0
            comes = "lookahead" if ready else _asked_as(track.decision.mode) if asks else None
            if match is not None and self._copies.beats_model(
                match, sequence, comes, max(1, k), len(sequences)
            ):
                track.match = match
                proposals[sequence.request_id] = match.proposal()
            elif prepared is not None and ready:
                proposals[sequence.request_id] = prepared.first(room)
            elif asks:
                to_ask.append(sequence)
            else:
                # Empty, it is falsy, and still says why: a miss is no "off".
                proposals[sequence.request_id] = NO_PROPOSAL if prepared is None else prepared
        proposals.update(self._asking.ask(to_ask, self._tracks, deadline))
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
            requests.append(
                track.request(sequence, k, reach, branches=branches, proposal=proposal, fanout=fanout)
            )
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
            self._copies.learn(track.match, verification.num_accepted, num_tested)
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

    def _from_table(self, sequence: Sequence, track: Track, reply: DraftReply | None) -> DraftProposal | None:
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

    @staticmethod
    def _asks_now(track: Track, prepared: DraftProposal | None) -> bool:
        if track.decision.mode in ("colocated", "synchronous"):
            return True
        missed = prepared is not None and prepared.empty_cause == "miss"
        return track.decision.mode == "lookahead" and track.decision.sync_on_miss and missed


def _asked_as(mode: ModelMode) -> ModelMode:
    """How a draft is asked for a proposal now: after a look-ahead miss, as in synchronous mode."""
    return "synchronous" if mode == "lookahead" else mode
