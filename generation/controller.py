"""Choosing K and the mode from what was measured (speculation.md, section 6; SmartSpec 2406.14066).

For every mode the controller predicts tokens per second at the current batch size from running means of a
verification's time by width, the draft's step time, the wait for a reply, the acceptance rate of the domain
and the look-ahead hit rate, and takes the best. A challenger must be clearly better (hysteresis), and a small
share of decisions tries another mode so that a recovered draft is noticed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

ModelMode = Literal["off", "colocated", "synchronous", "lookahead"]
_HYSTERESIS = 1.05
_EXPLORED_ROUNDS = 4
_EVERY_DOMAIN = ""
_MOST_DOUBT = 0.8
_ASKING_MARGIN = 1.15
"""Asking keeps the draft from the next table, which the comparison does not see: measured, a tenth is no gain."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next round of one domain does. ``num_draft_tokens`` 0 is plain decoding (passages aside)."""

    mode: ModelMode
    num_draft_tokens: int
    sync_on_miss: bool = False


class RunningMean:
    """An exponentially weighted mean that starts at its first observation."""

    def __init__(self, weight: float = 0.1) -> None:
        self._weight = weight
        self.value: float | None = None

    def update(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)

    def get(self, default: float) -> float:
        return default if self.value is None else self.value


class StepCosts:
    """Seconds of a verification as a line in its rows: t(rows) = base + slope · rows, fitted online.

    Weighted least squares whose past fades, so that it follows a changed machine or a longer context.
    """

    _FADE = 0.98

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._mean_step = RunningMean(0.05)

    def update(self, rows: int, seconds: float) -> None:
        fade = self._FADE
        self._n, self._x, self._y = fade * self._n + 1, fade * self._x + rows, fade * self._y + seconds
        self._xx, self._xy = fade * self._xx + rows * rows, fade * self._xy + rows * seconds
        self._mean_step.update(seconds)

    def seconds(self, rows: float) -> float:
        """Predicted seconds; until widths vary a row is taken to cost a twentieth of a step."""
        if self._n < 1:
            return 0.05
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x**2
        slope = (self._xy / self._n - mean_x * mean_y) / variance if variance > 0.5 else mean_y / 20
        slope = min(max(slope, 0.0), mean_y)
        return max(mean_y + slope * (rows - mean_x), 0.2 * mean_y)


class AlphaEstimate:
    """α of the model draft in one domain: fading counts with a prior that all domains share."""

    def __init__(self, prior: AlphaEstimate | None = None, weight: float = 10.0, start: float = 0.55) -> None:
        self._prior = prior
        self._weight = weight
        self._start = start
        self._accepted = self._tested = 0.0

    def update(self, num_accepted: float, num_tested: int) -> None:
        self._accepted = 0.995**num_tested * self._accepted + num_accepted
        self._tested = 0.995**num_tested * self._tested + num_tested

    @property
    def value(self) -> float:
        prior = self._prior.value if self._prior is not None else self._start
        return (self._accepted + self._weight * prior) / (self._tested + self._weight)


class ProposalLength:
    """Running means of a proposal's length and of what was kept of it."""

    def __init__(self) -> None:
        self.drafted = RunningMean(0.05)
        self.accepted = RunningMean(0.05)

    def update(self, num_drafted: int, num_accepted: int) -> None:
        self.drafted.update(num_drafted)
        self.accepted.update(num_accepted)


def expected_accepted(alpha: float, k: int) -> float:
    """Σ_{i=1..k} α^i: draft tokens a round of k keeps."""
    return sum(alpha**i for i in range(1, k + 1))


class Controller:
    """Decides per domain and batch size; ``observe_*`` feed it."""

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        modes: tuple[ModelMode, ...],
        exploration_rate: float = 0.02,
        seed: int = 0,
        adaptive_length: bool = False,
    ) -> None:
        """``adaptive_length``: proposals end by the draft's own doubt, so K is not chosen but measured."""
        self._max_k = max_draft_tokens
        self._adaptive = adaptive_length
        self._lengths: dict[str, ProposalLength] = {}
        self._modes = modes
        self._exploration_rate = exploration_rate
        self._random = random.Random(seed)
        self.verification = StepCosts()
        self.draft_step = RunningMean()
        self.table_wait = RunningMean()
        self.sync_overhead = RunningMean()
        self.hit_rate = AlphaEstimate(start=0.8)
        self.hit_rate_after_plain = AlphaEstimate(start=0.8)
        self._all = AlphaEstimate()
        self._domains: dict[str, AlphaEstimate] = {}
        self._current: dict[str, Decision] = {}
        self._exploring: dict[str, tuple[int, ModelMode]] = {}

    def alpha(self, domain: str) -> float:
        return self._domains[domain].value if domain in self._domains else self._all.value

    def observe_round(self, domain: str, overlap_sum: float, num_tested: int) -> None:
        """Tested positions of a model proposal and their summed overlap (or acceptances)."""
        self._all.update(overlap_sum, num_tested)
        self._domains.setdefault(domain, AlphaEstimate(self._all)).update(overlap_sum, num_tested)

    def observe_table(self, hit: bool, *, after_plain: bool) -> None:
        """Whether a look-ahead table held the outcome; ``after_plain``: of a round without a proposal."""
        self.hit_rate.update(float(hit), 1)
        if after_plain:
            self.hit_rate_after_plain.update(float(hit), 1)

    def observe_length(self, domain: str, num_drafted: int, num_accepted: int) -> None:
        """How long a model proposal was and how much of it was kept."""
        for name in {domain, _EVERY_DOMAIN}:
            self._lengths.setdefault(name, ProposalLength()).update(num_drafted, num_accepted)

    def min_reach(self, mode: ModelMode, domain: str, batch_size: int) -> float:
        """The chance of being accepted whole below which a proposal should grow no further.

        One more draft token saves, with that chance, the seconds a token costs now; it costs a row of the
        verification and, unless it is drafted beside one, a draft step shared by the batch. 0: grow to K.
        """
        if not self._adaptive:
            return 0.0
        t1 = self.verification.seconds(batch_size)
        row = self.verification.seconds(batch_size + 1) - t1
        drafting = 0.0 if mode == "lookahead" else self.draft_step.get(t1 / 6) / batch_size
        drafted, accepted = self._expected(domain, self._max_k, self.alpha(domain))
        seconds = t1 + drafted * (batch_size * row + drafting)
        return min(_MOST_DOUBT, (row + drafting) * batch_size * (1.0 + accepted) / seconds)

    def _expected(self, domain: str, k: int, alpha: float) -> tuple[float, float]:
        """``(drafted, accepted)`` tokens of a model proposal of at most k: measured when lengths adapt."""
        length = self._lengths.get(domain) or self._lengths.get(_EVERY_DOMAIN)
        if not self._adaptive or length is None or length.drafted.value is None:
            return float(k), expected_accepted(alpha, k)
        return length.drafted.get(k), length.accepted.get(0.0)

    def tokens_per_second(
        self, mode: ModelMode, k: int, alpha: float, batch_size: int, domain: str = ""
    ) -> float:
        """Predicted rate of one sequence, at ``batch_size`` sequences a step."""
        t1 = self.verification.seconds(batch_size)
        if mode == "off" or k == 0:
            return 1.0 / t1
        drafted, accepted = self._expected(domain, k, alpha)
        if mode == "lookahead":
            tv = self.verification.seconds(batch_size * (drafted + 1))
            tokens = 1.0 + accepted
            # Hopeful until measured: a mode that is never tried never shows what it can do.
            hit = self.hit_rate.value
            wait = self.table_wait.get(0.0)
            return (hit * tokens + (1.0 - hit)) / (hit * tv + (1.0 - hit) * t1 + wait)
        return self.model_round_rate(mode, k, alpha, batch_size, domain)

    def round_rate(
        self, num_drafted: float, num_accepted: float, batch_size: int, drafting_seconds: float = 0.0
    ) -> float:
        """Tokens per second of a round with such a proposal."""
        seconds = self.verification.seconds(batch_size * (num_drafted + 1))
        return (1.0 + num_accepted) / (seconds + drafting_seconds)

    def model_round_rate(self, mode: ModelMode, k: int, alpha: float, batch_size: int, domain: str) -> float:
        """The same for a proposal of the draft model; one from a look-ahead table costs no more drafting."""
        drafted, accepted = self._expected(domain, k, alpha)
        return self.round_rate(
            drafted, accepted, batch_size, self._drafting_seconds(mode, drafted, batch_size)
        )

    def _drafting_seconds(self, mode: ModelMode, num_drafted: float, batch_size: int) -> float:
        """What a round waits for its proposal."""
        if mode == "lookahead":
            return 0.0
        t1 = self.verification.seconds(batch_size)
        overhead = self.sync_overhead.get(0.2 * t1) if mode == "synchronous" else 0.0
        return num_drafted * self.draft_step.get(t1 / 6) + overhead

    def status(self) -> dict[str, Any]:
        """What is believed now, as plain JSON (seconds; None until measured)."""
        return {
            "alpha": self._all.value,
            "alpha_by_domain": {domain: estimate.value for domain, estimate in self._domains.items()},
            "draft_step_seconds": self.draft_step.value,
            "table_wait_seconds": self.table_wait.value,
            "sync_overhead_seconds": self.sync_overhead.value,
            "hit_rate": self.hit_rate.value,
            "decisions": {
                domain: {"mode": decision.mode, "num_draft_tokens": decision.num_draft_tokens}
                for domain, decision in self._current.items()
            },
        }

    def decide(self, domain: str, batch_size: int, *, draft_open: bool) -> Decision:
        """The best mode and K now; an occasional other one when exploring."""
        modes = self._modes if draft_open else tuple(m for m in self._modes if m in ("off", "colocated"))
        alpha = self.alpha(domain)
        options = {
            (mode, k): self.tokens_per_second(mode, k, alpha, batch_size, domain)
            for mode in modes
            for k in ((0,) if mode == "off" else range(self._max_k if self._adaptive else 1, self._max_k + 1))
        }
        if not options:
            return Decision("off", 0)
        mode, k = max(options, key=lambda option: options[option])
        current = self._current.get(domain)
        if current is not None and (current.mode, current.num_draft_tokens) in options:
            held = options[current.mode, current.num_draft_tokens]
            if options[mode, k] < held * _HYSTERESIS:
                mode, k = current.mode, current.num_draft_tokens
        asks = mode == "lookahead" and self.asks_on_miss(k, domain, batch_size)
        self._current[domain] = Decision(mode, k, asks)
        return self._explored(domain, modes) or self._current[domain]

    def asks_on_miss(self, k: int, domain: str, batch_size: int) -> bool:
        """After a look-ahead miss: does waiting for a proposal promise more than a plain step?

        Two rounds are compared. After a plain step only the next token is open, so the table behind it hits
        far more often: what the plain step loses the next round regains.
        """
        drafted, accepted = self._expected(domain, k, self.alpha(domain))
        t1 = self.verification.seconds(batch_size)
        tv = self.verification.seconds(batch_size * (drafted + 1))
        drafting = self._drafting_seconds("synchronous", drafted, batch_size)
        plain = (2.0 + accepted * self.hit_rate_after_plain.value) / (t1 + tv)
        asked = (2.0 + accepted + accepted * self.hit_rate.value) / (2.0 * tv + drafting)
        return asked > plain * _ASKING_MARGIN

    def _explored(self, domain: str, modes: tuple[ModelMode, ...]) -> Decision | None:
        """Now and then a few rounds of another mode, so that α and costs stay known.

        Look-ahead needs a round to prepare its first table: one round alone would learn nothing.
        """
        current = self._current[domain]
        left, other = self._exploring.get(domain, (0, current.mode))
        if left == 0:
            others = [mode for mode in modes if mode not in ("off", current.mode)]
            if not others or self._random.random() >= self._exploration_rate / _EXPLORED_ROUNDS:
                return None
            left, other = _EXPLORED_ROUNDS, self._random.choice(others)
        self._exploring[domain] = (left - 1, other)
        if other not in modes:
            return None
        return Decision(other, current.num_draft_tokens or min(2, self._max_k))
