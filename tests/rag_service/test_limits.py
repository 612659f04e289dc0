"""Rate limits by caller, and the gate with its honest time to come back."""

from __future__ import annotations

import pytest

from rag_service.auth import Principal
from rag_service.config import ConfigError, LimitsConfig
from rag_service.errors import ApiError
from rag_service.limits import Gate, RateLimiter

ALICE = Principal("acme", frozenset({"chat"}), "a")
BOB = Principal("acme", frozenset({"chat"}), "b", requests_per_minute=1)


async def test_requests_are_counted_by_key_and_a_keys_own_limit_goes_first() -> None:
    limiter = RateLimiter(LimitsConfig(requests_per_minute=2))
    headers = await limiter.admit(ALICE)
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    await limiter.admit(ALICE)
    await limiter.admit(BOB)
    for caller in (ALICE, BOB):
        with pytest.raises(ApiError, match="requests a minute is reached") as refused:
            await limiter.admit(caller)
        assert refused.value.status == 429
        assert 1 <= int(refused.value.headers["Retry-After"]) <= 60
        assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"


async def test_tokens_are_charged_afterwards() -> None:
    limiter = RateLimiter(LimitsConfig(tokens_per_minute=100))
    assert (await limiter.admit(ALICE))["x-ratelimit-remaining-tokens"] == "100"
    await limiter.charge(ALICE, 60)
    assert (await limiter.admit(ALICE))["x-ratelimit-remaining-tokens"] == "40"
    await limiter.charge(ALICE, 500)
    with pytest.raises(ApiError, match="100 tokens a minute"):
        await limiter.admit(ALICE)


async def test_no_limits_no_headers() -> None:
    limiter = RateLimiter(LimitsConfig())
    assert await limiter.admit(ALICE) == {}
    await limiter.charge(ALICE, 10**9)


async def test_a_storage_that_fails_lets_requests_pass() -> None:
    pytest.importorskip("redis")
    limiter = RateLimiter(LimitsConfig(requests_per_minute=1, storage="redis://127.0.0.1:1/0"))
    assert await limiter.admit(ALICE) == {}
    assert await limiter.admit(ALICE) == {}


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be kept in"):
        RateLimiter(LimitsConfig(storage="postgres://secret@host/0"))


def test_the_gate_is_bounded_and_tells_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rag_service.limits.time.monotonic", lambda: now[0])
    gate = Gate(2)
    for _ in range(10):  # ten requests end, one every half second
        gate.enter()
        now[0] += 0.5
        gate.leave()
    gate.enter()
    gate.enter()
    waits = []
    for _ in range(4):
        with pytest.raises(ApiError) as refused:
            gate.enter()
        waits.append(int(refused.value.headers["retry-after-ms"]) / 1000)
    # A place frees every half second, and each refused caller stands behind the one before.
    assert waits == pytest.approx([0.5, 1.0, 1.5, 2.0], abs=0.01)
    assert refused.value.headers["Retry-After"] == "2"
    assert refused.value.body["error"]["code"] == "overloaded"
    gate.leave()
    gate.enter()


def test_a_request_that_would_be_late_is_refused_unless_nothing_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("rag_service.limits.time.monotonic", lambda: now[0])
    gate = Gate(100, deadline_seconds=10.0)
    for _ in range(5):
        gate.enter()
        now[0] += 4.0  # four seconds each: of three at a time the third would take twelve
        gate.leave()
        now[0] += 500.0  # idle time says nothing
    gate.enter()
    gate.enter()
    with pytest.raises(ApiError, match="at work on 2 requests"):
        gate.enter()


def test_a_long_overload_that_is_over_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rag_service.limits.time.monotonic", lambda: now[0])
    gate = Gate(1)
    for _ in range(10):
        gate.enter()
        now[0] += 0.5
        gate.leave()
    gate.enter()
    waits = [_wait_of(gate) for _ in range(500)]
    assert max(waits) == 120.0
    gate.leave()
    now[0] += 300.0  # nobody asks for five minutes, so nobody stands in front any more
    gate.enter()
    assert _wait_of(gate) < 1.0


def test_a_gate_that_knows_nothing_says_a_second() -> None:
    gate = Gate(1)
    gate.enter()
    assert _wait_of(gate) == 1.0


def _wait_of(gate: Gate) -> float:
    with pytest.raises(ApiError) as refused:
        gate.enter()
    return int(refused.value.headers["retry-after-ms"]) / 1000
