"""What every benchmark shares: the machine's description, paired repetition, and where results go."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHARED_DATA = ROOT.parent / "shared" / "data"
sys.path.append(str(ROOT))  # faults and stand-ins are those of the tests
DOMAINS = ("finance", "medical", "legal", "software", "general")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of repeated ratios or times."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ``ValueError`` for no values."""
        if not values:
            raise ValueError("nothing was measured")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), quartiles[0], quartiles[2], len(values))


def parser(description: str) -> argparse.ArgumentParser:
    """Common options."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--quick", action="store_true", help="end within five minutes")
    arguments.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments.add_argument(
        "--data", type=Path, default=SHARED_DATA, help="folder of domains with questions.jsonl"
    )
    return arguments


def machine() -> dict[str, Any]:
    """What the numbers were measured on; load is the machine's other work at that moment."""
    packages = ("torch", "transformers", "ray", "qdrant-client", "sentence-transformers")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "commit": _commit(),
        "load_average": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def seconds(function: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def say(text: str) -> None:
    """Progress, on standard error, so that ``--json`` stays pure."""
    print(text, file=sys.stderr, flush=True)


def publish(name: str, result: dict[str, Any], as_json: bool) -> None:
    """Write ``results/NAME.json`` and print it: as JSON, or as a plain listing."""
    result = {"benchmark": name, "machine": machine(), **_plain(result)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result) if as_json else "\n".join(_listing(result)))


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(below) for below in value]
    return value


def _listing(value: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, below in value.items():
        if isinstance(below, dict):
            lines.append(f"{indent}{key}:")
            lines += _listing(below, indent + "  ")
        else:
            shown = f"{below:.4g}" if isinstance(below, float) else below
            lines.append(f"{indent}{key}: {shown}")
    return lines


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _commit() -> str:
    shown = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or "unknown"
