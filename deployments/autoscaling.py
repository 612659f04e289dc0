"""How many replicas a deployment needs, by what its replicas say of themselves.

Serve's own policy knows calls. A target with few calls of long prompts is full all the same, and a draft that
answers after the target has verified hides nothing. So each replica tells its signals, which Serve fetches by
``record_autoscaling_stats`` and averages over its look-back, and the policy follows the most pressed one; Serve
applies bounds and delays to what it wants. Serve's controller loads this module by itself: it imports nothing of
this project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

QUEUED_TOKENS = "queued_tokens"
"""Tokens yet to compute for requests that wait in the engine's queue."""
KV_USE = "kv_use"
"""Share of the key-value slots in use, 0 to 1."""
REPLY_SHARE = "reply_share"
"""Time until the draft's reply over the target's own step: above 1 drafting is not hidden, and rounds wait."""
BUSY_SHARE = "busy_share"
"""Share of the time in which the draft computes: one that is seldom busy is slow by itself, and a second one beside
it would be as slow."""
ACCEPTANCE = "acceptance_rate"
"""α as the targets measure it; told only when there is one."""


class SignalPolicy:
    """Wants ``max(calls / ongoing, Σ signal / aim)`` replicas, over the signals named in ``aims``.

    ``calls`` are those at work and waiting, ``ongoing`` is ``target_ongoing_requests``. A signal in ``limits``
    wants no more than another explains: ``{signal: (other, aim of the other)}``. Below ``min_acceptance`` one
    replica is enough: more drafting of what is not accepted is waste, and the last one keeps α measured.
    A sum over replicas divided by the aim of one is what all together would need, so a signal that is a ratio
    (shares of slots, of time) scales as a count does.
    """

    def __init__(
        self,
        aims: Mapping[str, float],
        limits: Mapping[str, Sequence[Any]] | None = None,
        min_acceptance: float = 0.0,
    ) -> None:
        self._aims = dict(aims)
        self._limits = dict(limits or {})
        self._min_acceptance = min_acceptance

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Replicas wanted (a fraction, which Serve rounds up), and no state of its own."""
        if context.current_num_replicas == 0:  # nobody measures; Serve begins one when a call waits
            return context.target_num_replicas, {}
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        wanted = [context.total_num_requests / context.config.get_target_ongoing_requests()]
        for name, aim in self._aims.items():
            needed = _sum(metrics, name) / aim
            if name in self._limits:
                other, other_aim = self._limits[name]
                needed = min(needed, _sum(metrics, other) / other_aim)
            wanted.append(needed)
        acceptance = list(metrics.get(ACCEPTANCE, {}).values())
        if acceptance and sum(acceptance) / len(acceptance) < self._min_acceptance:
            return min(1.0, max(wanted)), {}
        return max(wanted), {}


def _sum(metrics: Mapping[str, Mapping[Any, float]], name: str) -> float:
    return sum(value for value in metrics.get(name, {}).values() if math.isfinite(value))
