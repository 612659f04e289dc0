"""Does the service stay as it was? Mixed load for a while, with memory, handles and latency over time.

The whole service is started on a free port with an index of its own, the sample corpus is indexed, and its
questions are asked again and again. Each slice of the run is one sample: requests, errors, P95, and of each part
of the service the memory that is its own (USS: a sum of resident sizes would count shared pages many times) and
its open files. Judged is the second half, since caches fill in the first: flat is a rise of at most 2 % by the
line through its slices. A run under ten minutes is not judged: it is over before the caches are full.

    python benchmarks/soak.py [--minutes 20] [--concurrency 4] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import parser, publish, say

from deployments.app import run
from rag_service.cli.client import Client
from rag_service.cli.corpus import ingest_corpus
from rag_service.config import Settings
from rag_service.load import LoadPlan, Question, Sample, run_load
from rag_service.load_questions import mixed, read_questions

CORPUS = Path(__file__).resolve().parents[1] / "examples" / "corpus"
ARMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "plain chat": {"rag": {"enabled": False}, "max_tokens": 24},
    "refused": {"temperature": 9.0},
}
"""What each question is asked as; the last must be refused and must leave no trace."""
EXPECTED_ERRORS = {"refused": "http_400"}
NUM_SLICES = 20
FLAT = 0.02
MIN_JUDGED_MINUTES = 10.0
TITLE = re.compile(r"ray::(?:ServeReplica:\w+:)?(\w+)")


def soak(minutes: float, concurrency: int) -> dict[str, Any]:
    """Start, load, measure, stop. Returns what ``publish`` writes."""
    with tempfile.TemporaryDirectory(prefix="rag-soak-") as folder:
        settings = Settings.load(None, {"data_folder": folder, "service.port": 0})
        with run(settings) as service, Client(service.url) as client:
            ingest_corpus(client, CORPUS, lambda done, total: None)
            model = str(client.call("GET", "/v1/models")["data"][0]["id"])
            questions = tuple(mixed(read_questions([CORPUS / "questions.jsonl"]), [], None, 0))
            slices = []
            for number in range(NUM_SLICES):
                slices.append(
                    one_slice(service.url, model, questions, minutes * 60 / NUM_SLICES, concurrency)
                )
                say(f"slice {number + 1} of {NUM_SLICES}: {slices[-1]}")
    return {"minutes": minutes, "slices": slices, **trend(slices, judged=minutes >= MIN_JUDGED_MINUTES)}


def one_slice(
    url: str, model: str, questions: tuple[Question, ...], seconds: float, concurrency: int
) -> dict[str, Any]:
    """Load for about ``seconds``; then look at the processes."""
    plan = LoadPlan(
        url,
        model,
        questions,
        1000,
        ARMS,
        concurrency=concurrency,
        max_tokens=48,
        num_warmup=0,
        max_seconds=seconds,
    )
    result = asyncio.run(run_load(plan))
    errors = [sample for sample in result.samples if not as_expected(sample)]
    times = [sample.total_seconds for sample in result.samples if sample.error is None]
    memory, handles = footprint()
    total = sum(memory.values())
    return {
        "num_requests": len(result.samples),
        "num_errors": len(errors),
        "errors": sorted({f"{sample.arm}: {sample.error}" for sample in errors}),
        "p95_seconds": round(float(np.percentile(times, 95)), 3) if times else None,
        "own_mib": round(total / 2**20, 1),
        "own_mib_by_part": {part: round(size / 2**20, 1) for part, size in sorted(memory.items())},
        "file_descriptors": sum(handles.values()),
    }


def as_expected(sample: Sample) -> bool:
    """Whether a request ended as its arm must."""
    return sample.error == EXPECTED_ERRORS.get(sample.arm)


def footprint() -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of their own and open descriptors of what this process started, by part: deployment or Ray's role."""
    memory: dict[str, int] = {}
    handles: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            part = part_of(process)
            memory[part] = memory.get(part, 0) + process.memory_full_info().uss
            handles[part] = handles.get(part, 0) + process.num_fds()
        except psutil.Error:
            continue  # it has just ended
    return memory, handles


def part_of(process: psutil.Process) -> str:
    """``Target`` of ``ray::ServeReplica:rag:Target``; idle workers and Ray's own processes by their names."""
    title = TITLE.match(" ".join(process.cmdline()))
    return title.group(1) if title else process.name()


def trend(slices: list[dict[str, Any]], *, judged: bool) -> dict[str, Any]:
    """Totals, what the second half grew by, and whether that is flat (None: too short to say)."""
    later = slices[len(slices) // 2 :]
    memory = growth([part["own_mib"] for part in later])
    handles = growth([part["file_descriptors"] for part in later])
    parts = sorted({part for one in later for part in one["own_mib_by_part"]})
    return {
        "num_requests": sum(part["num_requests"] for part in slices),
        "num_errors": sum(part["num_errors"] for part in slices),
        "memory_growth": memory,
        "file_descriptor_growth": handles,
        "mib_growth_by_part": {
            part: round(slope([one["own_mib_by_part"].get(part, 0.0) for one in later]) * (len(later) - 1), 1)
            for part in parts
        },
        "flat": (memory <= FLAT and handles <= FLAT) if judged else None,
    }


def growth(values: list[float]) -> float:
    """Of the line through ``values``, from the first to the last, as a share of their mean."""
    return round(slope(values) * (len(values) - 1) / float(np.mean(values)), 4)


def slope(values: list[float]) -> float:
    """Of the least-squares line through equally spaced values."""
    if len(values) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def main() -> int:
    """Run it; exit status 1 when a request ended otherwise than it must, or memory or open files are not flat."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--minutes", type=float, default=20.0)
    arguments.add_argument("--concurrency", type=int, default=4)
    chosen = arguments.parse_args()
    started = time.monotonic()
    result = soak(2.0 if chosen.quick else chosen.minutes, chosen.concurrency)
    result["total_seconds"] = round(time.monotonic() - started, 1)
    publish("soak", result, chosen.json)
    return 1 if result["num_errors"] or result["flat"] is False else 0


if __name__ == "__main__":
    sys.exit(main())
