"""Muon for the draft's weight matrices, AdamW for the rest, as one optimizer.

Muon (momentum orthogonalised by Newton-Schulz) needs markedly fewer steps than AdamW on the matrices inside a
transformer, and steps are what a CPU is short of. Norms and the output head stay with AdamW, as its authors
advise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Two torch optimizers behind one interface: schedulers and checkpoints see one list of groups."""

    def __init__(self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], lr: float) -> None:
        self.parts: list[torch.optim.Optimizer] = []
        muon, adam = list(matrices), list(others)
        super().__init__([*muon, *adam], {"lr": lr})
        if muon:
            self.parts.append(
                torch.optim.Muon(muon, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
            )
        if adam:
            self.parts.append(torch.optim.AdamW(adam, lr=lr, betas=(0.9, 0.98), weight_decay=0.0))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of both parts; ``closure`` is not supported."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]], lr: float) -> MuonWithAdamW:
    """Split trainable parameters: two-dimensional ones inside the decoder's layers go to Muon."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in named:
        if not weight.requires_grad:
            continue
        (matrices if weight.dim() == 2 and ".layers." in name else others).append(weight)
    return MuonWithAdamW(matrices, others, lr)
