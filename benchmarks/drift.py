"""How often does the drift check cry wolf in stationary weeks, and how late does it see α fall?

    python benchmarks/drift.py [--quick] [--json] [--output FILE]

Weeks are simulated request by request: each has its own rate (beta, so tokens of a request are correlated), a
random number of tested positions, and an arrival time that follows the hour of the day. The check runs once
an hour over the days so far, as the recorder does, and one alarm in a week makes it a false one. The same
seeds give the same numbers on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from generation.types import ROUND_CAUSES
from rag_service.drift import detect_drift
from rag_service.request_columns import RequestColumns

HOUR = 3600.0
HOURS_A_WEEK = 168
CONCENTRATION = 12.0
"""Spread of the requests' own rates: standard deviation .10 at α = .85."""


def simulated_columns(
    rng: np.random.Generator, rates: np.ndarray[Any, np.dtype[np.float64]], started_at: Any
) -> RequestColumns:
    """Requests with the given mean rate each, ``[n]``, and start times in order, ``[n]``."""
    count = len(rates)
    own = rng.beta(CONCENTRATION * rates, CONCENTRATION * (1 - rates))
    tested = 5 + rng.poisson(30, count)
    accepted = rng.binomial(tested, own).astype(float)
    names = {"domain": "finance", "outcome": "ok", "target": "t", "draft": "d", "mode": "lookahead"}
    names |= {"drafter": "model", "acceptance_method": "token", "temperature": "0"}
    counts = dict.fromkeys(("num_rounds", "lookahead_hits", "lookahead_misses"), np.zeros(count))
    counts |= {"num_accepted_tokens": accepted, "num_rejections": tested - accepted}
    counts |= {"num_draft_tokens": tested.astype(float), "num_generated_tokens": tested.astype(float)}
    counts |= {"overlap_sum": own * tested, "num_overlap": tested.astype(float)}
    return RequestColumns(
        {name: np.full(count, value, dtype=object) for name, value in names.items()},
        counts,
        {cause: np.zeros(count) for cause in ROUND_CAUSES},
        {},
        {},
        np.asarray(started_at, dtype=np.float64),
    )


def arrivals(rng: np.random.Generator, per_hour: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Start times over one week: busy afternoons, quiet nights."""
    hours = np.arange(HOURS_A_WEEK)
    volume = rng.poisson(per_hour * (1 + 0.8 * np.sin(2 * np.pi * (hours - 9) / 24)))
    return np.sort(np.repeat(hours, volume) * HOUR + rng.uniform(0, HOUR, volume.sum()))


def hourly(columns: RequestColumns) -> Iterator[tuple[int, RequestColumns]]:
    """What the check sees at the end of each hour."""
    for hour in range(1, HOURS_A_WEEK + 1):
        yield hour, columns.where(columns.started_at < hour * HOUR)


def is_false_alarm(seed: int, rate: float, per_hour: float, baseline: float | None) -> bool:
    """Whether a week of unchanging rate raises an alarm at any hour.

    Every other week mixes two kinds of requests, .10 above and below the rate.
    """
    rng = np.random.default_rng(seed)
    times = arrivals(rng, per_hour)
    apart = 0.1 if seed % 2 else 0.0
    columns = simulated_columns(rng, rate + apart * rng.choice([-1.0, 1.0], len(times)), times)
    return any(detect_drift(seen, baseline) is not None for _, seen in hourly(columns))


def delay_of(seed: int, per_hour: float, baseline: float | None) -> dict[str, float] | None:
    """α falls from .85 to .62 on Wednesday noon: hours and requests until the alarm; None: missed."""
    rng = np.random.default_rng(seed)
    times = arrivals(rng, per_hour)
    fallen = 60 * HOUR
    columns = simulated_columns(rng, np.where(times < fallen, 0.85, 0.62), times)
    for hour, seen in hourly(columns):
        found = detect_drift(seen, baseline)
        if found is not None and hour * HOUR > fallen:
            return {
                "hours": hour - 60,
                "requests": float(np.sum(seen.started_at >= fallen)),
                "begin_error_hours": abs(found["begun_at"] - fallen) / HOUR,
            }
        if found is not None:
            return None
    return None


def measure(num_weeks: int) -> dict[str, Any]:
    """Both questions at two volumes, with and without a baseline."""
    result: dict[str, Any] = {"num_weeks": num_weeks, "settings": {}}
    for per_hour in (6.0, 60.0):
        for baseline in (0.85, None):
            name = f"{per_hour:.0f}_an_hour_{'baseline' if baseline else 'no_baseline'}"
            alarms = sum(is_false_alarm(seed, 0.85, per_hour, baseline) for seed in range(num_weeks))
            off = sum(is_false_alarm(500 + seed, 0.83, per_hour, baseline) for seed in range(num_weeks))
            delays = [delay_of(1000 + seed, per_hour, baseline) for seed in range(num_weeks)]
            seen = [delay for delay in delays if delay is not None]
            result["settings"][name] = {
                "false_alarms": alarms,
                "false_alarms_at_0.83": off,
                "missed": num_weeks - len(seen),
                **{
                    f"{key}_{part}": float(np.percentile([delay[key] for delay in seen], percent))
                    for key in ("hours", "requests", "begin_error_hours")
                    for part, percent in (("median", 50), ("p95", 95))
                    if seen
                },
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 weeks instead of 100")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    result = measure(20 if arguments.quick else 100)
    text = json.dumps(result, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['num_weeks']} weeks each")
    for name, found in result["settings"].items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in found.items()))


if __name__ == "__main__":
    main()
