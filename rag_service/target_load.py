"""How full the targets are, as Prometheus gauges: what a scaler and an operator look at first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rag_service.target_status import kv_slots, targets_of


@dataclass(frozen=True, slots=True)
class TargetLoad:
    """Sums over the target replicas that answered. ``kv_use_max``: of the fullest one, 0 to 1, since a sum
    hides a single full replica. ``num_draft_replicas``: as the target that sees most of them has it; None when
    the targets have no draft to ask."""

    num_targets: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_kv_slots: int
    num_kv_slots_used: int
    kv_use_max: float
    num_draft_replicas: int | None


def target_load(status: Mapping[str, Any]) -> TargetLoad:
    """From ``GeneratorBackend.status()``: one target's, or several under ``replicas``. What is not told is 0."""
    targets = targets_of(status)
    slots = [kv_slots(target) for target in targets]
    drafts = [link["replicas"] for target in targets if "replicas" in (link := target.get("link") or {})]
    return TargetLoad(
        num_targets=len(targets),
        num_running=sum(target.get("running", 0) for target in targets),
        num_waiting=sum(target.get("waiting", 0) for target in targets),
        num_waiting_tokens=sum(target.get("queued_tokens", 0) for target in targets),
        num_kv_slots=sum(total for total, _ in slots),
        num_kv_slots_used=sum(used for _, used in slots),
        kv_use_max=max((used / total for total, used in slots if total), default=0.0),
        num_draft_replicas=max(drafts, default=None),
    )


class LoadCollector(Collector):
    """Gauges of the last known load; no samples while it is not known, since an old figure would mislead."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.load: TargetLoad | None = None
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, text, value in _gauges(self.load):
            family = GaugeMetricFamily(name, text)
            if value is not None:
                family.add_metric([], value)
            yield family


def _gauges(load: TargetLoad | None) -> list[tuple[str, str, float | None]]:
    def of(name: str) -> float | None:
        return getattr(load, name) if load is not None else None

    return [
        ("rag_target_replicas", "Target replicas that answer.", of("num_targets")),
        ("rag_target_running_requests", "Requests in the targets' batches.", of("num_running")),
        ("rag_target_waiting_requests", "Requests in the targets' own queues.", of("num_waiting")),
        (
            "rag_target_waiting_tokens",
            "Tokens yet to compute for waiting requests.",
            of("num_waiting_tokens"),
        ),
        ("rag_kv_slots", "Slots of the targets' key-value caches.", of("num_kv_slots")),
        ("rag_kv_slots_used", "Key-value slots in use.", of("num_kv_slots_used")),
        ("rag_kv_use_max_ratio", "Share of slots in use of the fullest target.", of("kv_use_max")),
        ("rag_draft_replicas", "Draft replicas that answer the targets.", of("num_draft_replicas")),
    ]
