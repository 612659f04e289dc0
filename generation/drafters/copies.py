"""Copies as proposals: the longest match in the passages or past answers, as long as it pays, if it pays."""

from __future__ import annotations

from dataclasses import replace

from generation.config import SpeculationConfig
from generation.controller import Controller, ModelMode, expected_accepted
from generation.drafters.passages import HistoryStore, Match, MatchAcceptance, PassageDrafter
from generation.drafters.track import Track
from generation.sequence import Sequence


class Copies:
    """Finds copies and weighs them against the draft model, by tokens a second."""

    def __init__(self, config: SpeculationConfig, controller: Controller) -> None:
        self._config = config
        self._controller = controller
        self._history = HistoryStore(config.history_tokens) if config.history else None
        self._acceptance = MatchAcceptance()

    def index(self, sequence: Sequence) -> PassageDrafter:
        """The sequence's prompt and passages, ready for matches."""
        request = sequence.request
        return PassageDrafter(request.prompt_ids, request.passage_ids, self._config.passages_min_match)

    def remember(self, sequence: Sequence) -> None:
        """A finished answer becomes history of its tenant and domain."""
        if self._history is not None and sequence.finish_reason in ("stop", "length"):
            history = self._history.get(sequence.request.tenant, sequence.request.domain)
            history.add(sequence.token_ids[sequence.num_prompt_tokens :])

    def best(self, sequence: Sequence, track: Track, room: int, batch_size: int) -> Match | None:
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
        reach = self._controller.min_reach("lookahead", sequence.request.domain, batch_size)
        rate, length = self._acceptance.rate(match.match_length), 1
        while length < len(match.token_ids) and rate ** (length + 1) >= reach:
            length += 1
        return replace(match, token_ids=match.token_ids[:length])

    def beats_model(
        self, match: Match, sequence: Sequence, comes: ModelMode | None, k: int, batch_size: int
    ) -> bool:
        """Does copying, which costs no drafting, promise more tokens a second than the draft model?

        ``comes``: how the model's proposal does (``lookahead``: it is here already); None: it doesn't.
        """
        if comes is None:
            return True
        domain = sequence.request.domain
        alpha = self._controller.alpha(domain)
        rate, length = self._acceptance.rate(match.match_length), len(match.token_ids)
        copied = self._controller.round_rate(length, expected_accepted(rate, length), batch_size)
        return copied >= self._controller.model_round_rate(comes, k, alpha, batch_size, domain)

    def learn(self, match: Match, num_accepted: int, num_tested: int) -> None:
        """How often matches of this length are right."""
        self._acceptance.update(match.match_length, num_accepted, num_tested)
