"""Exact distributions of random programs: every choice is tried, each path weighted by its probability.

The functions of ``generation.acceptance`` and the draft sampler use a uniform number in two ways: compare it
once with a probability, or hand it to ``inverse_cdf``. Replacing both by branching turns any run of them,
up to the whole engine, into a tree that is walked to its last leaf: no sampling error, no tolerance beyond
floating point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

Result = TypeVar("Result", bound=Hashable)


class Enumerator:
    """Replays a program once a path, depth first."""

    def __init__(self) -> None:
        self._script: list[int] = []
        self._options: list[list[float]] = []
        self._depth = 0

    def choose(self, weights: Sequence[float]) -> int:
        """One option out of several with these (unnormalised) weights; impossible ones are never taken."""
        total = float(sum(weights))
        probs = [weight / total for weight in weights]
        if self._depth == len(self._script):
            self._script.append(next(i for i, p in enumerate(probs) if p > 0))
            self._options.append(probs)
        choice = self._script[self._depth]
        assert np.allclose(self._options[self._depth], probs), "the program is not deterministic"
        self._depth += 1
        return choice

    def distribution(self, program: Callable[[], Result]) -> dict[Result, float]:
        """The probability of each result of ``program``."""
        out: dict[Result, float] = defaultdict(float)
        while True:
            self._depth = 0
            result = program()
            del self._script[self._depth :], self._options[self._depth :]
            out[result] += float(np.prod([o[c] for o, c in zip(self._options, self._script, strict=True)]))
            if not self._advance():
                return dict(out)

    def _advance(self) -> bool:
        while self._script:
            probs, last = self._options[-1], self._script[-1]
            following = [i for i in range(last + 1, len(probs)) if probs[i] > 0]
            if following:
                self._script[-1] = following[0]
                return True
            self._script.pop()
            self._options.pop()
        return False


class Uniform(float):
    """A uniform number that is only ever compared: each comparison is a branch."""

    enumerator: Enumerator

    def __new__(cls, enumerator: Enumerator) -> Uniform:
        self = super().__new__(cls, 0.5)
        self.enumerator = enumerator
        return self

    def _is_below(self, bound: float) -> bool:
        below = min(1.0, max(0.0, float(bound)))
        if 1.0 - below < 1e-13:  # rounding, not a branch
            below = 1.0
        return self.enumerator.choose([below, 1.0 - below]) == 0

    def __lt__(self, bound: Any) -> bool:
        return self._is_below(bound)

    def __le__(self, bound: Any) -> bool:
        return self._is_below(bound)

    def __ge__(self, bound: Any) -> bool:
        return not self._is_below(bound)

    def __gt__(self, bound: Any) -> bool:
        return not self._is_below(bound)

    __hash__ = float.__hash__


def branching_inverse_cdf(enumerator: Enumerator) -> Callable[[npt.NDArray[np.floating], float], int]:
    """Stands in for ``acceptance.inverse_cdf``."""
    return lambda weights, uniform: enumerator.choose(np.asarray(weights, dtype=np.float64).tolist())


def patch_draws(monkeypatch: pytest.MonkeyPatch, enumerator: Enumerator) -> None:
    """Make every draw of acceptance and of the draft sampler a branch of ``enumerator``."""
    stand_in = branching_inverse_cdf(enumerator)
    monkeypatch.setattr("generation.acceptance.inverse_cdf", stand_in)
    monkeypatch.setattr("generation.drafters.draws.inverse_cdf", stand_in)


class BranchingRandom:
    """Stands in for ``RequestRandom`` of an unseeded request."""

    seeded = False

    def __init__(self, enumerator: Enumerator) -> None:
        self._enumerator = enumerator

    def uniforms(self, purpose: str, position: int, count: int) -> _Uniforms:
        return _Uniforms(Uniform(self._enumerator) for _ in range(count))


class _Uniforms(list[Uniform]):
    def tolist(self) -> list[Uniform]:
        return list(self)
