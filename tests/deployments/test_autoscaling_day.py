"""A day of load through Ray's own scaling decisions with the settings of overlay gpu-ha, by a simulated clock."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ray.serve.autoscaling_policy import _apply_delay_logic
from ray.serve.config import AutoscalingConfig

from deployments.options import DeploymentName, config_of, scaling_options
from rag_service.config import Settings

OVERLAY = Path(__file__).resolve().parents[2] / "k8s" / "overlays" / "gpu-ha" / "settings.yaml"
STEP_SECONDS = 10
DAY_SECONDS = 86_400
SCALED: tuple[DeploymentName, ...] = ("Gateway", "Reranker", "Target", "Draft")


def scaling_of(name: DeploymentName) -> AutoscalingConfig:
    deployments = yaml.safe_load(OVERLAY.read_text(encoding="utf-8"))["deployments"]
    settings = Settings.load(None, {"deployments": deployments})
    return AutoscalingConfig(**scaling_options(name, config_of(settings, name))["autoscaling_config"])


def load_of_a_day(peak: float, seed: int) -> list[int]:
    """Calls at work and waiting every ten seconds: low at night, high at noon, by chance about that (Poisson),
    with two bursts of five minutes to twice the load."""
    rng = np.random.default_rng(seed)
    times = np.arange(0, DAY_SECONDS, STEP_SECONDS)
    mean = peak * (0.1 + 0.9 * (0.5 - 0.5 * np.cos(2 * np.pi * times / DAY_SECONDS)) ** 1.5)
    for begin in rng.integers(0, DAY_SECONDS - 300, size=2):
        mean[(times >= begin) & (times < begin + 300)] *= 2
    return [int(value) for value in rng.poisson(mean)]


def replicas_over(load: list[int], config: AutoscalingConfig) -> list[int]:
    """Replicas at each step: calls averaged over Serve's look-back, over the target, bounded, then delayed."""
    seen: deque[int] = deque(maxlen=max(1, int(config.look_back_period_s) // STEP_SECONDS))
    state: dict[str, Any] = {}
    number, numbers = config.min_replicas, []
    for step, calls in enumerate(load):
        seen.append(calls)
        wanted = math.ceil(sum(seen) / len(seen) / float(config.target_ongoing_requests or 1))
        wanted = min(max(wanted, config.min_replicas), config.max_replicas)
        number, state = _apply_delay_logic(wanted, number, config, state, _now=float(step * STEP_SECONDS))
        numbers.append(number)
    return numbers


def num_turns(numbers: list[int]) -> int:
    """How often the number turned from growing to shrinking or back."""
    changes = np.sign(np.diff(numbers))
    changes = changes[changes != 0]
    return int((changes[1:] != changes[:-1]).sum())


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("seed", range(5))
def test_no_flapping_over_a_day(name: DeploymentName, seed: int) -> None:
    config = scaling_of(name)
    each = float(config.target_ongoing_requests or 1)
    peak = 0.8 * config.max_replicas * each
    load = load_of_a_day(peak, seed)
    numbers = replicas_over(load, config)
    # The day's hill and two bursts have 5 turns of their own; at a boundary chance may add some.
    assert num_turns(numbers) <= 13
    assert max(numbers) == config.max_replicas or max(numbers) * each >= peak
    assert numbers[-1] <= config.min_replicas + 1
    hasty = config.model_copy(update={"downscale_delay_s": 0.0, "upscale_delay_s": 0.0})
    assert num_turns(replicas_over(load, hasty)) > 2 * num_turns(numbers)


def test_a_steady_load_changes_nothing_after_its_first_rise() -> None:
    config = scaling_of("Target")
    numbers = replicas_over([150] * 1000, config)
    assert set(numbers[100:]) == {3}
