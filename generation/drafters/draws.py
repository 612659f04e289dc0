"""How the draft samples: from its top m tokens, and ships exactly what it sampled from."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from generation.acceptance import inverse_cdf
from generation.drafters.branches import Branch
from generation.model_runner import LoadedModel
from generation.sampling import RequestRandom, race_winner
from generation.types import NOW, DraftRequest


class DraftSampler:
    """One request's draws from the draft.

    Temperature, bias and truncation are the request's own; penalties and grammars are left to the target,
    which is exact with any draft distribution. The distribution restricted to its m likeliest tokens and
    renormalised is the one sampled and shipped (the rule of the wire). Greedy drafts are point masses.
    """

    def __init__(self, request: DraftRequest, model: LoadedModel, support_size: int) -> None:
        self.request = request
        self._sampling = request.sampling
        self._model = model
        self._support_size = support_size
        self._random = RequestRandom(request.sampling.seed, request.request_id)
        self._races: dict[int, np.ndarray] = {}

    def top_tokens(self, logits: Tensor, count: int, excluded: int | None) -> list[int]:
        """The likeliest vocabulary ids of one row ``[n]``, without ``excluded``."""
        logits = self._biased(logits)
        best = self._to_vocabulary(logits.topk(min(count + 1, logits.shape[-1])).indices).tolist()
        return [token_id for token_id in best if token_id != excluded][:count]

    def outlook(
        self, logits: Tensor, proposed: Seq[int], count: int
    ) -> tuple[np.ndarray, np.ndarray, Seq[int], np.ndarray]:
        """What the draft expects after each token of a proposal, for ``likeliest_outcomes``.

        ``logits [K + 1, n]``; returns its ``count + 1`` likeliest ids and their probabilities ``[K + 1, m]``,
        ``proposed``, and the probabilities ``[K]`` of the proposed tokens (0 outside a trimmed head).
        """
        logits = self._biased(logits).float() / (self._sampling.temperature or 1.0)
        probs = torch.softmax(logits, dim=-1)
        top = probs.topk(min(count + 1, probs.shape[-1]), dim=-1)
        own = self._probs_of(proposed, probs[: len(proposed)]).cpu().numpy()
        return self._to_vocabulary(top.indices).cpu().numpy(), top.values.cpu().numpy(), proposed, own

    def extend(self, branches: Seq[Branch], logits: Tensor) -> None:
        """Draw the next token of each branch from its row of ``logits [len(branches), n]``."""
        logits = self._biased(logits)
        if self._sampling.temperature == 0.0:
            best = logits.max(dim=-1)
            probs_of_best = (best.values - logits.logsumexp(dim=-1)).exp().tolist()
            ids_of_best = self._to_vocabulary(best.indices).tolist()
            for branch, token_id, prob in zip(branches, ids_of_best, probs_of_best, strict=True):
                branch.add(int(token_id), prob)
            return
        ids, probs = self._supports(logits)
        for row, branch in enumerate(branches):
            choice = self._draw(branch, ids[row], probs[row])
            branch.add(
                int(ids[row][choice]), float(probs[row][choice]), ids[row], probs[row].astype(np.float32)
            )

    def _supports(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """``ids, probs``, both ``[rows, m]``: the truncated, renormalised float32 distributions."""
        sampling = self._sampling
        size = min(self._support_size, logits.shape[-1], sampling.top_k or self._support_size)
        top = logits.float().topk(size, dim=-1)
        probs = torch.softmax(top.values / sampling.temperature, dim=-1)
        if sampling.top_p < 1.0:
            keep = probs.cumsum(-1) - probs < sampling.top_p
            keep[..., 0] = True
            probs = probs * keep
        if sampling.min_p > 0.0:
            probs = probs * (probs >= sampling.min_p * probs[..., :1])
        probs = probs / probs.sum(-1, keepdim=True)
        return self._to_vocabulary(top.indices).cpu().numpy(), probs.cpu().numpy()

    def _draw(self, branch: Branch, ids: np.ndarray, probs: np.ndarray) -> int:
        position = self.request.confirmed_length + branch.num_accepted + branch.depth
        if self._random.seeded:
            # The target races the same noise (coupled acceptance): agreeing is then as likely as can be.
            if position not in self._races:
                self._races[position] = self._random.race(position, self._model.vocab_size)
            return race_winner(probs, self._races[position][ids])
        # Round and purpose are in the name: a position proposed again (after a rejection, or asked for now and
        # prepared in one round) gets fresh numbers, since block verification looks at the whole proposal.
        purpose = f"draft:{self.request.round_id}:{'now' if branch.outcome == NOW else 'table'}"
        return inverse_cdf(probs, float(self._random.uniforms(purpose, position, 1)[0]))

    def _biased(self, logits: Tensor) -> Tensor:
        bias = self._sampling.logit_bias
        if not bias:
            return logits
        out = logits.clone()
        id_map = self._model.id_map
        for token_id, amount in bias.items():
            rows = [token_id] if id_map is None else torch.nonzero(id_map == token_id)[:, 0].tolist()
            for row in rows:
                if row < out.shape[-1]:
                    out[..., row] += amount
        return out

    def _probs_of(self, token_ids: Seq[int], probs: Tensor) -> Tensor:
        """The probability of one vocabulary id a row of ``probs [k, n]``; 0 where a trimmed head lacks it."""
        ids = torch.tensor(token_ids, dtype=torch.long, device=probs.device)[:, None]
        id_map = self._model.id_map
        return probs.gather(1, ids)[:, 0] if id_map is None else (probs * (id_map == ids)).sum(dim=-1)

    def _to_vocabulary(self, rows: Tensor) -> Tensor:
        id_map = self._model.id_map
        return rows if id_map is None else id_map[rows]
