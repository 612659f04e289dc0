"""Load on a running service: closed loop (so many at once) or open loop (so many a second), by HTTP.

With several arms (speculation on and off) each question is asked in every arm, so that arms are compared on the
same questions. Arms take turns in short blocks, in an order drawn anew for each block: drift of the machine and
a prefix cache warmed by the other arm then fall on both alike, and no batch ever mixes arms.

In an open loop a request's time counts from when it was due, not from when it could be sent: a service that
stalls must not look better for having kept the sender waiting.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import numpy as np

MAX_CONCURRENCY: Final = 256
MAX_RATE: Final = 1000.0
MAX_REQUESTS: Final = 100_000


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and of which domain (None: the service infers it)."""

    text: str
    domain: str | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A bounded load. ``rate`` None is a closed loop of ``concurrency``; given, an open loop of that many
    requests a second with at most ``concurrency`` in flight. ``arms``: name → fields put into each request.
    ``num_questions`` are asked in every arm; ``max_seconds`` ends the run early with what there is.
    ``num_retries``: so often a request answered 429 comes back when it was told to; its time counts on."""

    url: str
    model: str
    questions: tuple[Question, ...]
    num_questions: int
    arms: dict[str, dict[str, Any]]
    concurrency: int = 4
    rate: float | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    num_warmup: int = 2
    max_seconds: float = 600.0
    request_seconds: float = 120.0
    num_retries: int = 0
    api_key: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.questions or not self.arms:
            raise ValueError("There is nothing to ask.")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"The concurrency must lie between 1 and {MAX_CONCURRENCY}.")
        if self.rate is not None and not 0 < self.rate <= MAX_RATE:
            raise ValueError(f"The rate must lie above 0 and at {MAX_RATE:.0f} a second at most.")
        if not 1 <= self.num_questions * len(self.arms) <= MAX_REQUESTS:
            raise ValueError(f"A run has at least one request and {MAX_REQUESTS} at most.")

    @property
    def num_requests(self) -> int:
        return self.num_questions * len(self.arms)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. ``error``: a code, None when the answer came whole. Seconds."""

    arm: str
    pair: int
    domain: str
    total_seconds: float
    error: str | None = None
    first_token_seconds: float | None = None
    text: str = ""
    num_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    retry_after_seconds: tuple[float, ...] = ()
    """What each 429 on the way told the client to wait."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All samples but the warm-up's. ``busy_seconds``: time each arm's blocks took together."""

    plan: LoadPlan
    samples: list[Sample]
    busy_seconds: dict[str, float]
    ended_early: bool


async def run_load(plan: LoadPlan, on_sample: Callable[[Sample], None] = lambda sample: None) -> LoadResult:
    """Put the load on the service; ``on_sample`` hears of every finished request."""
    rng = np.random.default_rng(plan.seed)
    ends_at = time.monotonic() + plan.max_seconds
    samples: list[Sample] = []
    busy = dict.fromkeys(plan.arms, 0.0)
    async with _client(plan) as client:
        for index in range(plan.num_warmup):
            for arm in plan.arms:
                await _ask(client, plan, arm, index)
        for block in _blocks(plan):
            for arm in rng.permutation(list(plan.arms)):
                if time.monotonic() >= ends_at:
                    return LoadResult(plan, samples, busy, ended_early=True)
                started = time.monotonic()
                samples += await _run_block(client, plan, str(arm), block, rng, ends_at, on_sample)
                busy[str(arm)] += time.monotonic() - started
    return LoadResult(plan, samples, busy, ended_early=len(samples) < plan.num_requests)


def _client(plan: LoadPlan) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    local = httpx.URL(plan.url).host in ("127.0.0.1", "localhost", "::1")
    return httpx.AsyncClient(
        base_url=plan.url,
        headers=headers,
        timeout=httpx.Timeout(plan.request_seconds, connect=5.0),
        limits=httpx.Limits(max_connections=plan.concurrency),
        trust_env=not local,
    )


def _blocks(plan: LoadPlan) -> Iterator[list[int]]:
    # A single arm takes turns with none: an open loop that waited for its own queue to drain would be none.
    size = max(4, 4 * plan.concurrency) if len(plan.arms) > 1 else plan.num_questions
    for start in range(0, plan.num_questions, size):
        yield list(range(start, min(start + size, plan.num_questions)))


async def _run_block(
    client: httpx.AsyncClient,
    plan: LoadPlan,
    arm: str,
    block: Sequence[int],
    rng: np.random.Generator,
    ends_at: float,
    on_sample: Callable[[Sample], None],
) -> list[Sample]:
    gate = asyncio.Semaphore(plan.concurrency)
    gaps = rng.exponential(1.0 / plan.rate, len(block)) if plan.rate else np.zeros(len(block))
    begun = time.monotonic()

    async def one(index: int, after: float) -> Sample | None:
        due = begun + after
        await asyncio.sleep(max(0.0, min(due, ends_at) - time.monotonic()))
        async with gate:
            if time.monotonic() >= ends_at:
                return None
            sample = await _ask(client, plan, arm, index, due if plan.rate else None)
        on_sample(sample)
        return sample

    asked = await asyncio.gather(*map(one, block, np.cumsum(gaps)))
    return [sample for sample in asked if sample is not None]


async def _ask(
    client: httpx.AsyncClient, plan: LoadPlan, arm: str, index: int, due: float | None = None
) -> Sample:
    question = plan.questions[index % len(plan.questions)]
    started = time.monotonic() if due is None else due
    answer = _Answer(started)
    error = None
    try:
        async with asyncio.timeout(plan.request_seconds):
            error = await _stream(client, _body(plan, arm, question), answer)
            while error == "http_429" and 0 < len(answer.waits) <= plan.num_retries:
                await asyncio.sleep(answer.waits[-1])
                error = await _stream(client, _body(plan, arm, question), answer)
    except (TimeoutError, httpx.TimeoutException):
        error = "timeout"
    except httpx.HTTPError as problem:
        error = type(problem).__name__
    except ValueError:
        error = "no_json"
    return answer.sample(arm, index, question.domain or "", error)


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], answer: _Answer) -> str | None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            if wait := response.headers.get("retry-after"):
                answer.waits.append(float(wait))
            return f"http_{response.status_code}"
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                return None
            if data:
                error = answer.add(json.loads(data))
                if error is not None:
                    return error
    return "broken_off"


def _body(plan: LoadPlan, arm: str, question: Question) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": plan.model,
        "messages": [{"role": "user", "content": question.text}],
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **plan.arms[arm],
    }
    if question.domain is not None:
        body["rag"] = {**body.get("rag", {}), "domain": question.domain}
    return body


class _Answer:
    """Gathers the events of one stream."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._first_token: float | None = None
        self._parts: list[str] = []
        self._metrics: dict[str, Any] = {}
        self._num_tokens = 0
        self.waits: list[float] = []

    def add(self, event: dict[str, Any]) -> str | None:
        """Take one event; returns the code of an error event."""
        if "error" in event:
            return str((event["error"] or {}).get("code") or "error")
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                self._parts.append(text)
                if self._first_token is None:
                    self._first_token = time.monotonic() - self._started
        self._metrics = event.get("metrics") or self._metrics
        self._num_tokens = (event.get("usage") or {}).get("completion_tokens", self._num_tokens)
        return None

    def sample(self, arm: str, pair: int, domain: str, error: str | None) -> Sample:
        timings = self._metrics.get("timings") or {}
        return Sample(
            arm,
            pair,
            domain,
            time.monotonic() - self._started,
            error,
            self._first_token,
            "".join(self._parts),
            self._num_tokens,
            {name: float(value) for name, value in timings.items() if value is not None},
            self._metrics.get("speculative_decoding") or {},
            tuple(self.waits),
        )
