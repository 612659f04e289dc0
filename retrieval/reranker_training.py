"""Training the learned reranker's network on one's own questions; a minute on a CPU.

Listwise: among each question's candidates, the relevant ones should win the softmax. The embedder is frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from retrieval.ranking_model import network_inputs
from retrieval.token_vectors import FloatArray
from retrieval.types import RetrievalError


@dataclass(frozen=True, slots=True)
class RankingExample:
    """One question's candidates. ``features`` ``[c, features]``, ``relevant`` ``[c]``; ``group``: its domain;
    ``document_id``: a document that answers it (folds are split by documents)."""

    features: FloatArray
    relevant: npt.NDArray[np.bool_]
    group: str
    document_id: str

    @property
    def teaches(self) -> bool:
        return bool(self.relevant.any() and not self.relevant.all())


@dataclass(frozen=True, slots=True)
class RankingTraining:
    """How the network is trained."""

    num_networks: int = 3
    """Trained from different seeds and averaged (as one network of all their hidden units)."""
    width: int = 32
    num_epochs: int = 20
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    batch_size: int = 32
    seed: int = 0


def train_network(examples: Sequence[RankingExample], options: RankingTraining) -> dict[str, FloatArray]:
    """The tensors ``mean``, ``scale``, ``first``, ``first_bias`` and ``second``. Reproducible by its seed.

    Domains with few questions count for more than their share (by the square root), so that none is ignored.
    Raises ``RetrievalError`` when no example has both a relevant and an irrelevant candidate.
    """
    usable = [example for example in examples if example.teaches]
    if not usable:
        raise RetrievalError(
            "No question has a relevant and an irrelevant candidate to learn from.", "no_examples"
        )
    stacked = np.concatenate([example.features for example in usable])
    mean, scale = stacked.mean(axis=0), stacked.std(axis=0) + 1e-6
    inputs, relevant, mask = _padded(usable, mean, scale)
    weights = _group_weights([example.group for example in usable])
    networks = [
        _train_one(inputs, relevant, mask, weights, options, options.seed + number)
        for number in range(options.num_networks)
    ]
    first, first_bias, second = (np.concatenate(parts, axis=-1) for parts in zip(*networks, strict=True))
    return {
        "mean": mean.astype(np.float32),
        "scale": scale.astype(np.float32),
        "first": first,
        "first_bias": first_bias,
        "second": second / options.num_networks,
    }


def _train_one(
    inputs: torch.Tensor,
    relevant: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor,
    options: RankingTraining,
    seed: int,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """One network: ``first``, ``first_bias`` and ``second``."""
    generator = torch.Generator().manual_seed(seed)
    num_questions, features = inputs.shape[0], inputs.shape[2]
    bound = features**-0.5
    first = ((torch.rand(features, options.width, generator=generator) * 2 - 1) * bound).requires_grad_()
    first_bias = torch.zeros(options.width, requires_grad=True)
    second = ((torch.rand(options.width, generator=generator) * 2 - 1) * options.width**-0.5).requires_grad_()
    optimizer = torch.optim.AdamW(
        [first, first_bias, second], lr=options.learning_rate, weight_decay=options.weight_decay
    )
    num_steps = options.num_epochs * -(-num_questions // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=num_steps)
    for _ in range(options.num_epochs):
        for batch in torch.split(torch.randperm(num_questions, generator=generator), options.batch_size):
            hidden = torch.nn.functional.gelu(inputs[batch] @ first + first_bias, approximate="tanh")
            logs = torch.log_softmax((hidden @ second).masked_fill(~mask[batch], -1e4), dim=1)
            wanted = relevant[batch]
            losses = -(logs * wanted).sum(dim=1) / wanted.sum(dim=1)
            loss = (losses * weights[batch]).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    learned = [tensor.detach().numpy().astype(np.float32) for tensor in (first, first_bias, second)]
    return learned[0], learned[1], learned[2]


def fold_of(document_id: str, num_folds: int) -> int:
    """A document's fold: by its id alone, so that no document is on both sides of a split."""
    return int(hashlib.sha256(document_id.encode()).hexdigest(), 16) % num_folds


def _padded(
    examples: Sequence[RankingExample], mean: FloatArray, scale: FloatArray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs ``[n, c, 2 features]``, relevance ``[n, c]`` and which places are filled ``[n, c]``."""
    longest = max(len(example.relevant) for example in examples)
    inputs = torch.zeros(len(examples), longest, 2 * len(mean))
    relevant = torch.zeros(len(examples), longest)
    mask = torch.zeros(len(examples), longest, dtype=torch.bool)
    for i, example in enumerate(examples):
        size = len(example.relevant)
        inputs[i, :size] = torch.from_numpy(network_inputs(example.features, mean, scale))
        relevant[i, :size] = torch.from_numpy(example.relevant.astype(np.float32))
        mask[i, :size] = True
    return inputs, relevant, mask


def _group_weights(groups: Sequence[str]) -> torch.Tensor:
    names, counts = np.unique(groups, return_counts=True)
    by_name = dict(zip(names.tolist(), (counts**-0.5).tolist(), strict=True))
    weights = torch.tensor([by_name[group] for group in groups])
    return weights / weights.mean()
