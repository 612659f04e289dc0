"""The loss is least where draft and target agree, and its overlap is the acceptance rate."""

from __future__ import annotations

import pytest
import torch

from generation.distillation.objective import ObjectiveWeights, position_losses
from generation.distillation.offline import acceptance

KL = ObjectiveWeights(kl=1.0, overlap=0.0, greedy=0.0)


def test_overlap_and_kl_of_the_worked_example() -> None:
    target, draft = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.3, 0.5, 0.2]])
    rows = torch.tensor([[0, 1, 2]])
    loss, overlap = position_losses(draft.log(), rows, target.log(), KL)
    assert overlap.item() == pytest.approx(0.7, abs=1e-5)
    assert loss.item() == pytest.approx((target * (target / draft).log()).sum().item(), abs=1e-3)


@pytest.mark.parametrize("kept", [3, 2])
def test_training_on_the_loss_reaches_the_target(kept: int) -> None:
    """With the tail known only as a lump the top probabilities are still matched."""
    target = torch.tensor([[0.6, 0.3, 0.06, 0.04]])
    rows, logprobs = torch.arange(kept)[None], target.log()[:, :kept]
    logits = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(600):
        loss, _ = position_losses(logits, rows, logprobs, ObjectiveWeights(greedy=0.0))
        optimizer.zero_grad()
        torch.autograd.backward(loss.sum())
        optimizer.step()
    assert (logits.softmax(-1)[0, :kept] - target[0, :kept]).abs().max() < 0.02


def test_mass_of_ids_that_the_head_lacks_counts_against_the_overlap_only() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2]])
    rows = torch.tensor([[-1, 0, 1]])
    draft = torch.tensor([[0.6, 0.4]])  # the target's 0.3 and 0.2, renormalised
    loss, overlap = position_losses(draft.log(), rows, target.log(), KL)
    assert overlap.item() == pytest.approx(0.5, abs=1e-5)
    assert loss.item() == pytest.approx(0.0, abs=1e-2)


def test_expected_acceptance_by_temperature() -> None:
    target, draft = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.3, 0.5, 0.2]])
    rows = torch.tensor([[0, 1, 2]])
    assert acceptance(draft.log(), rows, target.log(), 0.0).item() == 0.0
    assert acceptance(draft.log(), rows, target.log(), 1.0).item() == pytest.approx(0.7, abs=1e-4)
    warm = torch.stack([(target.log() / 0.7).softmax(-1), (draft.log() / 0.7).softmax(-1)]).amin(0).sum()
    assert acceptance(draft.log(), rows, target.log(), 0.7).item() == pytest.approx(warm.item(), abs=1e-3)
