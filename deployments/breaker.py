"""Circuit breakers for replicas.

Pure logic: no Ray, no threads, no sleeping; time comes from an injectable clock.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Clock = Callable[[], float]
BreakerState = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When a breaker opens and how it closes again. Times are seconds.

    ``window_calls`` and ``window_seconds`` bound what is remembered. The breaker opens once at least
    ``min_calls`` calls are remembered and the failed share of their items reaches ``failure_share``. It stays
    open for ``open_seconds``, multiplied by ``backoff`` after each probe that fails, up to
    ``max_open_seconds``; then ``probes`` calls at a time may try, and ``successes_to_close`` good ones in a
    row close it.
    """

    window_calls: int = 20
    window_seconds: float = 30.0
    min_calls: int = 5
    failure_share: float = 0.5
    open_seconds: float = 0.5
    backoff: float = 2.0
    max_open_seconds: float = 15.0
    probes: int = 1
    successes_to_close: int = 2

    def __post_init__(self) -> None:
        if self.min_calls < 1 or self.window_calls < self.min_calls:
            raise ValueError("A breaker needs 1 <= min_calls <= window_calls.")
        if not 0.0 < self.failure_share <= 1.0:
            raise ValueError("failure_share must lie in (0, 1].")
        if self.probes < 1 or self.successes_to_close < 1 or self.backoff < 1.0:
            raise ValueError("probes and successes_to_close must be at least 1, backoff at least 1.0.")


class Breaker:
    """Decides whether a replica may be called, from the outcomes of its recent calls.

    Every ``allow()`` that returned True must be followed by exactly one ``record(...)`` or ``abandon()``.
    An outcome is a number of items that came back well and a number that did not, so a batch of which a part
    failed counts for that part: a replica that answers one request in ten is seen as failing although every
    call to it returns.
    """

    def __init__(self, config: BreakerConfig | None = None, clock: Clock = time.monotonic) -> None:
        self.config = config or BreakerConfig()
        self._clock = clock
        self._outcomes: deque[tuple[float, int, int]] = deque(maxlen=self.config.window_calls)
        self._open_since: float | None = None
        self._open_seconds = self.config.open_seconds
        self._probes_running = 0
        self._probe_successes = 0
        self.num_opened = 0

    @property
    def state(self) -> BreakerState:
        if self._open_since is None:
            return "closed"
        return "half_open" if self._clock() - self._open_since >= self._open_seconds else "open"

    @property
    def failure_share(self) -> float | None:
        """Failed share of the items remembered; None when nothing is."""
        self._forget_old()
        failed = sum(outcome[2] for outcome in self._outcomes)
        total = failed + sum(outcome[1] for outcome in self._outcomes)
        return failed / total if total else None

    @property
    def would_allow(self) -> bool:
        """What ``allow()`` would say, without taking a probe slot."""
        state = self.state
        return state == "closed" or (state == "half_open" and self._probes_running < self.config.probes)

    def allow(self) -> bool:
        """Whether to call now. In ``half_open`` a True takes one of the probe slots."""
        if not self.would_allow:
            return False
        if self.state != "closed":
            self._probes_running += 1
        return True

    def record(self, num_ok: int, num_failed: int) -> None:
        """Count one call's items. A call without any (an empty batch) only gives its probe slot back."""
        if num_ok < 0 or num_failed < 0:
            raise ValueError("Numbers of items cannot be negative.")
        if self._open_since is not None:
            self._record_probe(num_ok, num_failed)
            return
        if num_ok + num_failed == 0:
            return
        self._outcomes.append((self._clock(), num_ok, num_failed))
        share = self.failure_share
        enough = len(self._outcomes) >= self.config.min_calls
        if enough and share is not None and share >= self.config.failure_share:
            self._open(self.config.open_seconds)

    def succeeded(self) -> None:
        self.record(1, 0)

    def failed(self) -> None:
        self.record(0, 1)

    def abandon(self) -> None:
        """The allowed call was cancelled before it could tell anything."""
        self._probes_running = max(0, self._probes_running - 1)

    def trip(self) -> None:
        """Open at once: the replica is known to be gone."""
        self._open(self.config.open_seconds)

    def _record_probe(self, num_ok: int, num_failed: int) -> None:
        # A late answer to a call made before the breaker opened finds no probe running: it says nothing new.
        if self._probes_running == 0:
            return
        self._probes_running -= 1
        total = num_ok + num_failed
        if total == 0:
            return
        if num_failed / total >= self.config.failure_share:
            self._open(min(self._open_seconds * self.config.backoff, self.config.max_open_seconds))
            return
        self._probe_successes += 1
        if self._probe_successes >= self.config.successes_to_close:
            self._close()

    def _open(self, seconds: float) -> None:
        self._open_since = self._clock()
        self._open_seconds = seconds
        self._probes_running = 0
        self._probe_successes = 0
        self._outcomes.clear()
        self.num_opened += 1

    def _close(self) -> None:
        self._open_since = None
        self._open_seconds = self.config.open_seconds
        self._probes_running = 0
        self._probe_successes = 0

    def _forget_old(self) -> None:
        oldest = self._clock() - self.config.window_seconds
        while self._outcomes and self._outcomes[0][0] < oldest:
            self._outcomes.popleft()


class Breakers:
    """One breaker a replica, at most ``max_replicas`` remembered (the longest unused is forgotten first)."""

    def __init__(
        self,
        config: BreakerConfig | None = None,
        clock: Clock = time.monotonic,
        max_replicas: int = 64,
    ) -> None:
        self._config = config
        self._clock = clock
        self._max_replicas = max_replicas
        self._breakers: OrderedDict[str, Breaker] = OrderedDict()

    def __getitem__(self, replica_id: str) -> Breaker:
        breaker = self._breakers.get(replica_id)
        if breaker is None:
            breaker = self._breakers[replica_id] = Breaker(self._config, self._clock)
            while len(self._breakers) > self._max_replicas:
                self._breakers.popitem(last=False)
        self._breakers.move_to_end(replica_id)
        return breaker

    def keep(self, replica_ids: Iterable[str]) -> None:
        """Forget replicas that no longer exist, so that a restarted one begins with a clean sheet."""
        alive = set(replica_ids)
        for replica_id in [known for known in self._breakers if known not in alive]:
            del self._breakers[replica_id]

    def states(self) -> dict[str, BreakerState]:
        """Replica id → state, for ``status()`` and ``rag_draft_breaker_open{replica}``."""
        return {replica_id: breaker.state for replica_id, breaker in self._breakers.items()}
