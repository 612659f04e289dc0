"""The engine's checks and ratios on one GPU, in one call of less than ten minutes.

First the tests marked ``gpu`` (exactness against plain decoding, batching, seeds, memory), then the sections of
``engine.py`` on the device. Without a GPU it says so and ends: nothing is measured elsewhere in its name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from engine import add_size, measure
from harness import parser, publish, say

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--device", default="cuda:0")
    add_size(arguments)
    options = arguments.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        say("This machine shows no CUDA device: nothing was measured.")
        return 0
    say("the tests marked gpu")
    tests = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu"], cwd=ROOT, check=False)
    if tests.returncode:
        say("The checks failed, so no figures are taken.")
        return tests.returncode
    result = measure(options, options.device)
    if options.device.startswith("cuda"):
        result["gpu"] = torch.cuda.get_device_name(options.device)
        result["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(options.device)
    publish("gpu", result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
