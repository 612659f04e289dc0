"""What do users see when a part of the service dies, freezes or fills up, with load running?

The whole service with the packaged models is started on a free port, the sample corpus is indexed, and its
questions are asked without a pause, every other one as a stream. Then one fault after another: for each, requests
under way or begun until it was over, those lost by error code, the slowest, and the time until nothing failed any
more. The goal: lost is at most what the killed target held, with a retriable error; everything else waits or is
asked again by the service itself.

    python benchmarks/faults.py [--only NAME] [--quick] [--json]

The full disk needs the right to mount a tmpfs (root), and is left out without.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness import parser, publish, say

from deployments.app import run
from rag_service.cli.client import Client
from rag_service.cli.corpus import ingest_corpus
from rag_service.config import Settings
from rag_service.load_questions import mixed, read_questions

CORPUS = Path(__file__).resolve().parents[1] / "examples" / "corpus"
REPLICAS = ("Target", "Draft", "Retriever", "Reranker", "Recorder", "Gateway")
CONCURRENCY = 4
MAX_TOKENS = 16
CALM_SECONDS = 8.0
"""A fault is over when so long every request has succeeded, and one that began after it has."""
LONGEST_SECONDS = 150.0
DISK = "8m"
RETRIABLE = ("replica_lost", "overloaded", "unavailable", "connection", "http_500", "http_429")
"""What clients ask again. A gateway that dies takes its connections along: Serve's proxy answers 500 for those
that have no answer yet, and cuts streams. Beyond what a gateway
takes at all the proxy itself says 429."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: ``error`` is the API's code, ``connection`` for none at all, None when answered."""

    began: float
    ended: float
    error: str | None


@dataclass
class Load:
    """Asks without a pause, and remembers."""

    url: str
    model: str
    questions: list[str]
    asked: list[Asked] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)

    @asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        numbers = itertools.count()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONCURRENCY)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=150, trust_env=False, limits=limits
        ) as client:
            tasks = [asyncio.create_task(self._ask_on(client, numbers)) for _ in range(CONCURRENCY)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_on(self, client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        while True:
            number = next(numbers)
            self.running[number] = began = time.monotonic()
            error = await ask(client, self.body(number))
            del self.running[number]
            self.asked.append(Asked(began, time.monotonic(), error))
            await asyncio.sleep(0.5 if error else 0.0)

    def body(self, number: int, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        question = self.questions[number % len(self.questions)]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "stream": number % 2 == 1,
        }

    async def calm(self, since: float) -> None:
        """Return once nothing has failed for a while and something asked after ``since`` was answered."""
        while time.monotonic() - since < LONGEST_SECONDS:
            await asyncio.sleep(0.2)
            failed = max((a.ended for a in self.asked if a.error), default=0.0)
            good = any(a.began >= since and a.error is None for a in self.asked)
            old = any(began < since for began in self.running.values())
            if good and not old and time.monotonic() - max(failed, since) > CALM_SECONDS:
                return

    def seen(self, since: float) -> dict[str, Any]:
        """What users saw of the fault at ``since``."""
        concerned = [a for a in self.asked if a.ended >= since]
        lost = [a for a in concerned if a.error]
        good = [a.ended for a in concerned if a.error is None and a.began >= since]
        over = max([a.ended for a in lost] + ([min(good)] if good else []), default=since)
        return {
            "num_requests": len(concerned),
            "num_lost": len(lost),
            "lost": dict(Counter(str(a.error) for a in lost)),
            "longest_seconds": round(max((a.ended - max(a.began, since) for a in concerned), default=0.0), 1),
            "recovered_after_seconds": round(over - since, 1) if good else None,
            "hanging": len([began for began in self.running.values() if began < since]),
        }


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str | None:
    """The error's code; None for an answer that is whole."""
    try:
        if body["stream"]:
            async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                text = (await reply.aread()).decode()
        else:
            reply = await client.post("/v1/chat/completions", json=body)
            text = reply.text
    except httpx.HTTPError:
        return "connection"
    if '"error":' in text or reply.status_code != 200:
        return code_of(text) or f"http_{reply.status_code}"
    return None if "choices" in text and (not body["stream"] or "[DONE]" in text) else "cut short"


def code_of(text: str) -> str | None:
    """The API's error code in an answer or in a stream's last event."""
    _, found, rest = text.partition('"code":')
    return rest.split('"')[1] if found and '"' in rest else None


def pids(part: str) -> list[int]:
    """Processes of one actor class or deployment among those that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::") and part in title:
            found.append(process.pid)
    return found


async def kill(part: str) -> dict[str, Any]:
    for pid in pids(part):
        os.kill(pid, signal.SIGKILL)
    return {}


async def freeze(part: str) -> dict[str, Any]:
    """Stopped for good: only Serve's health check can end it."""
    for pid in pids(part):
        os.kill(pid, signal.SIGSTOP)
    return {}


async def pause(part: str, seconds: float) -> dict[str, Any]:
    """Stopped and continued: an outage shorter than Serve's patience."""
    stopped = pids(part)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    return {}


async def slow_reader(load: Load) -> dict[str, Any]:
    """A stream of 200 tokens read 64 bytes at a time with pauses, and one that is never read."""
    body = {**load.body(1, 200), "ignore_eos": True}
    num_bytes = 0
    async with (
        httpx.AsyncClient(base_url=load.url, timeout=150, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as reply,
        client.stream("POST", "/v1/chat/completions", json=body),
    ):
        ends_at = time.monotonic() + 15.0
        async for piece in reply.aiter_raw(64):
            num_bytes += len(piece)
            if time.monotonic() > ends_at:
                break
            await asyncio.sleep(0.05)
    return {"slow_reader_bytes": num_bytes}


async def connections(load: Load, count: int) -> dict[str, Any]:
    """Half of ``count`` connections say nothing, the other half ask at once."""
    host, port = load.url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(count // 2)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=load.url, timeout=150, trust_env=False, limits=limits) as client:
        asking = (ask(client, load.body(number, 4)) for number in range(count // 2))
        ended = Counter(str(error or "answered") for error in await asyncio.gather(*asking))
    for _, writer in idle:
        writer.close()
    return {"num_connections": count, "burst": dict(ended)}


async def full_disk(load: Load, folder: Path) -> dict[str, Any]:
    """No byte left where the request log lies, for some seconds; then there is room again."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            pass
    failing, ends_at = 0.0, time.monotonic() + 40.0
    while failing < 1.0 and time.monotonic() < ends_at:
        await asyncio.sleep(1.0)
        failing = await gauge(load.url, "rag_request_log_failing")
    filler.unlink()
    pending, ends_at = 1.0, time.monotonic() + 40.0
    while pending > 0.0 and time.monotonic() < ends_at:
        await asyncio.sleep(1.0)
        pending = await gauge(load.url, "rag_request_log_failing")
    dropped = await gauge(load.url, "rag_request_log_dropped_total")
    return {"alert_metric": failing == 1.0, "written_again": pending == 0.0, "num_rows_dropped": dropped}


async def gauge(url: str, name: str) -> float:
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        for line in (await client.get("/metrics")).text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    return -1.0


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A file system of a few MiB; None where none may be mounted."""
    with tempfile.TemporaryDirectory(prefix="rag-disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            mounted = False
        try:
            yield Path(folder) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", "-l", folder], check=False)


Fault = Callable[[], Awaitable[dict[str, Any]]]


def faults(load: Load, disk: Path | None, *, quick: bool) -> dict[str, Fault]:
    """Name → what to do."""
    found: dict[str, Fault] = {}
    for name in REPLICAS:
        found[f"kill {name}"] = lambda name=name: kill(f":{name}")  # type: ignore[misc]
    found["kill controller"] = lambda: kill("ServeController")
    found["kill proxy"] = lambda: kill("ProxyActor")
    found["index away for 5 s"] = lambda: pause(":Retriever", 5.0)
    found["slow reader"] = lambda: slow_reader(load)
    found["connections"] = lambda: connections(load, 200 if quick else 1000)
    if disk is not None:
        found["full disk"] = lambda: full_disk(load, disk)
    for name in ("Target",) if quick else REPLICAS:
        found[f"freeze {name}"] = lambda name=name: freeze(f":{name}")  # type: ignore[misc]
    return found


async def measure(load: Load, chosen: dict[str, Fault]) -> dict[str, Any]:
    """One fault after another under one load."""
    rows: dict[str, Any] = {}
    async with load.going():
        await load.calm(time.monotonic())
        for name, fault in chosen.items():
            since = time.monotonic()
            extra = await fault()
            await load.calm(since)
            rows[name] = {**load.seen(since), **extra}
            say(f"{name}: {rows[name]}")
    return rows


def main() -> int:
    """Run them; exit status 1 when a request was lost otherwise than with a retriable error."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--only", default="", help="faults whose name this regular expression finds")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="rag-faults-") as folder, small_disk() as disk:
        log = {"telemetry.folder": str(disk / "log")} if disk else {}
        settings = Settings.load(None, {"data_folder": folder, "service.port": 0, **log})
        with run(settings) as service, Client(service.url) as client:
            ingest_corpus(client, CORPUS, lambda done, total: None)
            model = str(client.call("GET", "/v1/models")["data"][0]["id"])
            questions = [q.text for q in mixed(read_questions([CORPUS / "questions.jsonl"]), [], None, 0)]
            load = Load(service.url, model, questions)
            wanted = faults(load, disk, quick=chosen.quick)
            wanted = {name: fault for name, fault in wanted.items() if re.search(chosen.only, name)}
            rows = asyncio.run(measure(load, wanted))
    publish("faults", {"rows": rows}, chosen.json)
    good = all(set(row["lost"]) <= set(RETRIABLE) and not row["hanging"] for row in rows.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
