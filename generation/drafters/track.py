"""What the proposer remembers of one sequence, and how it asks a draft about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from generation.controller import Decision
from generation.drafters.passages import Match, PassageDrafter
from generation.sequence import Sequence
from generation.types import NO_PROPOSAL, DraftProposal, DraftRequest, Verification


@dataclass(slots=True)
class Track:
    """One sequence's drafting: its decision for this round, what the draft holds of it, what was asked."""

    passages: PassageDrafter | None
    decision: Decision = field(default_factory=lambda: Decision("off", 0))
    num_sent: int = 0
    """Ids the draft is believed to hold."""
    table_round: int | None = None
    """The round in which a table was asked for that is not collected yet."""
    last: Verification | None = None
    match: Match | None = None
    """The copy proposed in this round, if one was."""

    def request(
        self,
        sequence: Sequence,
        k: int,
        min_reach: float,
        *,
        branches: int = 0,
        proposal: DraftProposal = NO_PROPOSAL,
        fanout: tuple[int, ...] = (),
    ) -> DraftRequest:
        """A message to the draft with the ids it lacks; from here on it is believed to hold them."""
        confirmed = len(sequence.token_ids)
        new_ids = tuple(sequence.token_ids[self.num_sent :])
        self.num_sent = confirmed
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
