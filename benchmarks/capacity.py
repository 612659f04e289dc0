"""How many targets and drafts for how many requests a second, and what a million tokens costs: a model.

Simulated, not measured: no GPU was at hand. The real scheduler and proposer run under ``simulate.py``'s clock with
step times derived from memory bandwidth; prices and the size of a request are inputs below, to be replaced by your
own. Retrieval, prompt building and the network are left out; prefill is reckoned from arithmetic.

    python benchmarks/capacity.py [--alpha 0.7] [--quick] [--json]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from harness import parser, publish, say
from simulate import Hardware, simulate

RATES = (10, 100, 1_000, 10_000, 100_000)
"""Requests a second."""
PROMPT_TOKENS, ANSWER_TOKENS = 900, 64
"""Of one request: three passages and a question, two or three sentences."""
UTILISATION = 0.7
"""Share of the largest rate that is planned for; the rest is for peaks and for a replica that is away."""
REACHED_BANDWIDTH, REACHED_ARITHMETIC = 0.7, 0.5
ROUND_TRIP_MS = 0.5
TABLE_BRANCHES = 16


@dataclass(frozen=True, slots=True)
class Gpu:
    """Vendor's figures: GB/s of memory, dense 16-bit TFLOP/s. ``price``: US dollars an hour, an example of a
    cloud's list prices and no offer."""

    name: str
    bandwidth: float
    teraflops: float
    price: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Billions of parameters and bytes a parameter of target and draft; GPUs of a target replica."""

    name: str
    target: float
    target_bytes: float
    draft: float
    draft_bytes: float
    num_gpus: int


GPUS = (
    Gpu("L4", 300, 121, 0.8),
    Gpu("A100 80 GB", 2039, 312, 2.5),
    Gpu("H100 SXM", 3350, 989, 4.0),
    Gpu("H200", 4800, 989, 5.0),
)
PAIRS = (
    Pair("8B + 0.6B, 16 bits", 8.0, 2.0, 0.6, 2.0, 1),
    Pair("70B at 8 bits + 1.5B", 70.0, 1.0, 1.5, 2.0, 2),
)
FITS = {"L4": 24, "A100 80 GB": 80, "H100 SXM": 80, "H200": 141}
"""GB of memory; a pair is left out where its weights take more than 80 % of it."""


def hardware(pair: Pair, gpu: Gpu) -> Hardware:
    """Step times: weights by bandwidth once a step, and arithmetic a row."""
    bandwidth = gpu.bandwidth * REACHED_BANDWIDTH
    arithmetic = gpu.teraflops * 1e3 * REACHED_ARITHMETIC
    return Hardware(
        f"{pair.name} on {gpu.name}",
        pair.target * pair.target_bytes / (bandwidth * pair.num_gpus) * 1e3,
        2 * pair.target / (arithmetic * pair.num_gpus) * 1e3,
        pair.draft * pair.draft_bytes / bandwidth * 1e3,
        2 * pair.draft / arithmetic * 1e3,
    )


def row(pair: Pair, gpu: Gpu, alpha: float, batch: int) -> dict[str, Any]:
    """Of one pair on one type of GPU: rates of a target, what a draft feeds, cost, and replicas by rate.

    ``colocated``: draft and target share the GPU; ``apart``: the draft has one of the same type, look-ahead.
    """
    steps = hardware(pair, gpu)
    k = 8 if alpha >= 0.8 else 5 if alpha >= 0.6 else 3
    trip = ROUND_TRIP_MS / 1e3
    rates = {
        "off": simulate(steps, "off", alpha, 0.0, batch, k)["rate"],
        "colocated": simulate(steps, "colocated", alpha, 0.0, batch, k)["rate"],
        "apart": simulate(steps, "auto", alpha, trip, batch, k)["rate"],
    }
    prefill = PROMPT_TOKENS * steps.target_row / 1e3
    # A request takes its share of a batch's decoding, and its prefill, in which the batch waits.
    per_second = {name: UTILISATION / (ANSWER_TOKENS / rate + prefill) for name, rate in rates.items()}
    table = steps.draft_step(2 * batch) + k * steps.draft_step(batch * TABLE_BRANCHES)
    # A table takes the draft so long, and a verification the target: so many it feeds in time; below 1 not one.
    feeds = steps.verification(batch * (k + 1)) / (table + trip)
    drafts_each = 1 / max(1, int(feeds))
    gpus = {"off": pair.num_gpus, "colocated": pair.num_gpus, "apart": pair.num_gpus + drafts_each}
    return {
        "pair": pair.name,
        "gpu": gpu.name,
        "batch": batch,
        "tokens_per_second": {name: round(rate) for name, rate in rates.items()},
        "decode_seconds": {name: round(ANSWER_TOKENS * batch / rate, 2) for name, rate in rates.items()},
        "requests_per_second": {name: round(rate, 1) for name, rate in per_second.items()},
        "usd_per_million_tokens": {
            name: round(gpu.price * gpus[name] / (rate * ANSWER_TOKENS * 3600) * 1e6, 2)
            for name, rate in per_second.items()
        },
        "targets_per_draft": round(feeds, 1),
        "replicas": {str(rate): replicas(rate, per_second["apart"], drafts_each) for rate in RATES},
    }


def replicas(rate: float, per_second: float, drafts_each: float) -> dict[str, int]:
    """Targets and drafts for ``rate`` requests a second; two targets at least, so that one may be away."""
    targets = max(2, math.ceil(rate / per_second))
    return {"targets": targets, "drafts": math.ceil(targets * drafts_each)}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--alpha", type=float, default=0.7, help="acceptance rate of the draft")
    options = arguments.parse_args()
    batches = (8,) if options.quick else (1, 8, 32)
    rows = []
    for pair in PAIRS:
        for gpu in GPUS:
            if pair.target * pair.target_bytes / pair.num_gpus > 0.8 * FITS[gpu.name]:
                continue
            rows += [row(pair, gpu, options.alpha, batch) for batch in batches]
            say(f"{pair.name} on {gpu.name}: {rows[-1]}")
    assumptions = {
        "alpha": options.alpha,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "utilisation": UTILISATION,
        "round_trip_ms": ROUND_TRIP_MS,
    }
    publish("capacity", {**assumptions, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
