"""Does a running service keep answering in time when it is asked for more than it can do?

Open-loop load at several multiples of the sustainable rate, by the product's own load code. **Goodput**: answers a
second that came whole within the objective, counted from when each request was due. The sustainable rate is what
the service finishes in a closed loop that keeps it full, unless ``--rate`` names it. Goal: goodput at three times
that rate is 90 % or more of its peak.

A last run at the highest multiple lets every refused request come back once, when it was told to: an honest
Retry-After gets most of them in.

The service must know the objective too, or it takes on work that ends late:
``RAG_SERVICE_LIMITS__ANSWER_WITHIN_SECONDS=20 rag-service serve``, then ``python benchmarks/overload.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import DOMAINS, parser, publish, say

from rag_service.load import MAX_CONCURRENCY, LoadPlan, LoadResult, Question, Sample, run_load
from rag_service.load_questions import mixed, read_questions
from rag_service.statistics import percentiles

MULTIPLES = (0.5, 1.0, 2.0, 3.0)
GOAL = 0.9


def main() -> None:
    arguments = _arguments()
    plan = _plan(arguments)
    rate = arguments.rate or _sustainable(plan, 20 if arguments.quick else 60)
    seconds = arguments.seconds or (20.0 if arguments.quick else 120.0)
    stages = {}
    for multiple in MULTIPLES:
        say(f"{multiple:g} times {rate:.2f} requests a second, for {seconds:.0f} s")
        stages[f"{multiple:g}"] = stage_figures(
            asyncio.run(run_load(_open(plan, multiple * rate, seconds))), arguments.objective
        )
    say(f"{MULTIPLES[-1]:g} times again; the refused come back when told to")
    returning = replace(_open(plan, MULTIPLES[-1] * rate, seconds), num_retries=1)
    again = stage_figures(asyncio.run(run_load(returning)), arguments.objective)
    goodput = {name: stage["goodput_per_second"] for name, stage in stages.items()}
    share = goodput["3"] / max(goodput.values()) if max(goodput.values()) else 0.0
    # A rate measured while the machine was busy with something else is no rate to overload it with.
    overloaded = stages["3"]["num_in_time"] < stages["3"]["num_requests"]
    result = {
        "quick": arguments.quick,
        "sustainable_per_second": rate,
        "objective_seconds": arguments.objective,
        "max_tokens": plan.max_tokens,
        "stages": stages,
        "returning": again,
        "goodput_at_3_over_peak": share,
        "goal": GOAL,
        "overloaded_at_3": overloaded,
        "goal_met": share >= GOAL if overloaded else None,
    }
    publish("overload", result, arguments.json)


def stage_figures(result: LoadResult, objective: float) -> dict[str, Any]:
    """What one run showed. Goodput is over the time from the first request to the end of the last."""
    samples, seconds = result.samples, sum(result.busy_seconds.values())
    good = [sample for sample in samples if sample.error is None]
    in_time = [sample for sample in good if sample.total_seconds <= objective]
    refused = [sample for sample in samples if sample.retry_after_seconds]
    told = [sample.retry_after_seconds[0] for sample in refused]
    return {
        "offered_per_second": len(samples) / seconds if seconds else None,
        "goodput_per_second": len(in_time) / seconds if seconds else 0.0,
        "num_requests": len(samples),
        "num_in_time": len(in_time),
        "num_late": len(good) - len(in_time),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "latency_seconds": _percentiles(good),
        "num_refused_first": len(refused),
        "num_refused_without_retry_after": sum(
            sample.error == "http_429" and not sample.retry_after_seconds for sample in samples
        ),
        "retry_after_seconds": {"median": statistics.median(told), "max": max(told)} if told else None,
        "share_of_returning_admitted": (
            sum(len(sample.retry_after_seconds) == 1 for sample in refused) / len(refused)
            if refused and result.plan.num_retries
            else None
        ),
    }


def _percentiles(samples: list[Sample]) -> dict[str, float | None]:
    return dict(percentiles([sample.total_seconds for sample in samples]))


def _sustainable(plan: LoadPlan, num_questions: int) -> float:
    """Answers a second of a closed loop that keeps a few requests waiting."""
    say(f"closed loop of {plan.concurrency} at once, {num_questions} questions")
    result = asyncio.run(run_load(replace(plan, num_questions=num_questions)))
    good = sum(sample.error is None for sample in result.samples)
    if not good:
        raise SystemExit(f"No request was answered at {plan.url}.")
    return good / sum(result.busy_seconds.values())


def _open(plan: LoadPlan, rate: float, seconds: float) -> LoadPlan:
    # The sender must not hold requests back: with this many at once it is the service that refuses.
    count = max(10, round(rate * seconds))
    return replace(plan, rate=rate, num_questions=count, concurrency=MAX_CONCURRENCY, num_warmup=0)


def _plan(arguments: argparse.Namespace) -> LoadPlan:
    files = [arguments.data / domain / "questions.jsonl" for domain in DOMAINS]
    files = [file for file in files if file.exists()] or [Path("examples/corpus/questions.jsonl")]
    questions: list[Question] = mixed(read_questions(files), (), 40, 0)
    with urllib.request.urlopen(f"{arguments.url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    return LoadPlan(
        arguments.url, model, tuple(questions), len(questions), {"auto": {}},
        concurrency=arguments.concurrency, max_tokens=arguments.max_tokens,
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--url", default="http://127.0.0.1:8000")
    arguments.add_argument("--objective", type=float, default=20.0, help="seconds an answer may take")
    arguments.add_argument(
        "--rate", type=float, help="sustainable requests a second; measured when not given"
    )
    arguments.add_argument("--seconds", type=float, help="length of each run")
    arguments.add_argument("--concurrency", type=int, default=8, help="of the closed loop")
    arguments.add_argument("--max-tokens", type=int, default=64)
    return arguments.parse_args()


if __name__ == "__main__":
    main()
