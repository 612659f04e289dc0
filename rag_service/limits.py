"""How much a caller may ask (rate limits), and how much the service takes on (the gate)."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import StorageError
from limits.storage import storage_from_string

from rag_service.auth import Principal
from rag_service.config import ConfigError, LimitsConfig
from rag_service.errors import ApiError

logger = logging.getLogger(__name__)
STORAGE_SECONDS = 0.5
PAUSE_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 120.0


class Gate:
    """A bounded number of requests at work. Beyond it the answer is 429 at once, with a time to come back.

    That time comes from the measured rate at which requests end, and nobody is told the same time twice: the
    tenth to be refused is told to wait ten times as long as the first. Times that have passed hold nobody up.
    A request that by this rate would not be done within ``deadline_seconds`` is refused too: work that ends too
    late is capacity lost to those in time.
    """

    def __init__(self, max_in_flight: int, deadline_seconds: float = math.inf) -> None:
        self._max = max_in_flight
        self._deadline_seconds = deadline_seconds
        self._ends: deque[float] = deque(maxlen=64)
        self._busy_seconds = 0.0
        self._seen = time.monotonic()
        self._promised_at = 0.0
        self.num_in_flight = 0

    def enter(self) -> None:
        """Take a place. Raises ``ApiError`` 429 when there is none."""
        rate = self._rate()
        late = rate is not None and (self.num_in_flight + 1) / rate > self._deadline_seconds
        if self.num_in_flight >= self._max or (late and self.num_in_flight > 0):
            raise self.refusal(f"The service is at work on {self.num_in_flight} requests; try again later.")
        self.num_in_flight += 1

    def leave(self) -> None:
        """Give the place back."""
        self._ends.append(self._busy())
        self.num_in_flight -= 1

    def refusal(self, message: str) -> ApiError:
        """The 429 for a request that nothing here has room for, from whichever queue is full."""
        wait = self.wait_seconds()
        self._promised_at = time.monotonic() + wait
        return ApiError(429, message, code="overloaded", headers=retry_headers(wait))

    def wait_seconds(self) -> float:
        """How long until a place is free that has been promised to no refused request."""
        rate = self._rate()
        if rate is None:
            return 1.0
        ahead = max(0.0, self._promised_at - time.monotonic())
        return min(ahead + 1.0 / rate, LONGEST_WAIT_SECONDS)

    def _busy(self) -> float:
        """A clock that runs only while there is work: an idle night must not look like a slow service."""
        now = time.monotonic()
        if self.num_in_flight > 0:
            self._busy_seconds += now - self._seen
        self._seen = now
        return self._busy_seconds

    def _rate(self) -> float | None:
        """Requests ended a busy second, over the last minute of them; None when too few ended to tell."""
        now = self._busy()
        while self._ends and now - self._ends[0] > 60.0:
            self._ends.popleft()
        if len(self._ends) < 2 or now <= self._ends[0]:
            return None
        return (len(self._ends) - 1) / (now - self._ends[0])


class RateLimiter:
    """Requests and tokens a minute by tenant and key, in memory or in Redis.

    A storage that fails or is slow lets requests pass, and is left alone for some seconds: limits guard the
    service, they must not stop it.
    """

    def __init__(self, config: LimitsConfig) -> None:
        self._config = config
        self._paused_until = 0.0
        uri = config.storage.removeprefix("async+")
        options = {"implementation": "redispy"} if uri.startswith("redis") else {}
        try:
            storage = storage_from_string(f"async+{uri}", wrap_exceptions=True, **options)
        except Exception as error:
            raise ConfigError(f"The limits cannot be kept in {uri.split('@')[-1]}: {error}.") from None
        self._limiter = FixedWindowRateLimiter(storage)

    async def admit(self, principal: Principal) -> dict[str, str]:
        """Count one request; the ``x-ratelimit-*`` headers of its answer. Raises ``ApiError`` 429."""
        headers: dict[str, str] = {}
        for kind, item in self._items(principal).items():
            async with self._forgiving():
                headers.update(await self._count(kind, item, _identity(principal), headers))
        return headers

    async def charge(self, principal: Principal, num_tokens: int) -> None:
        """Count the tokens that a request took."""
        item = self._items(principal).get("tokens")
        if item is not None and num_tokens > 0:
            async with self._forgiving():
                await self._limiter.hit(item, "tokens", _identity(principal), cost=num_tokens)

    async def _count(
        self, kind: str, item: RateLimitItem, key: str, headers: Mapping[str, str]
    ) -> dict[str, str]:
        # A request is counted now; tokens only once they are known, so here they are looked at.
        free = await (self._limiter.hit if kind == "requests" else self._limiter.test)(item, kind, key)
        window = await self._limiter.get_window_stats(item, kind, key)
        wait = max(0.0, window.reset_time - time.time())
        counted = {
            f"x-ratelimit-limit-{kind}": str(item.amount),
            f"x-ratelimit-remaining-{kind}": str(max(0, window.remaining)),
            f"x-ratelimit-reset-{kind}": f"{wait:.3f}s",
        }
        if free:
            return counted
        message = f"The limit of {item.amount} {kind} a minute is reached; try again in {math.ceil(wait)} s."
        told = {**headers, **counted, **retry_headers(wait)}
        raise ApiError(429, message, code="rate_limit_exceeded", headers=told)

    @asynccontextmanager
    async def _forgiving(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(STORAGE_SECONDS):
                yield
        except (StorageError, OSError) as error:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            logger.error(
                "The rate limits' storage does not answer (%s); requests pass.", type(error).__name__
            )

    def _items(self, principal: Principal) -> Mapping[str, RateLimitItem]:
        if time.monotonic() < self._paused_until:
            return {}
        requests = principal.requests_per_minute or self._config.requests_per_minute
        tokens = principal.tokens_per_minute or self._config.tokens_per_minute
        given = {"requests": requests, "tokens": tokens}
        return {kind: RateLimitItemPerMinute(amount) for kind, amount in given.items() if amount}


def retry_headers(seconds: float) -> dict[str, str]:
    """``Retry-After`` in whole seconds, and ``retry-after-ms`` that OpenAI's clients prefer."""
    return {
        "Retry-After": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, round(seconds * 1000))),
    }


def _identity(principal: Principal) -> str:
    return f"{principal.tenant}/{principal.key_id or '-'}"
