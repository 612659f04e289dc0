"""The gauges of queue, key-value slots and draft replicas, from the status that targets give."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from rag_service.target_load import LoadCollector, TargetLoad, target_load

FIRST: dict[str, Any] = {
    "running": 4,
    "waiting": 2,
    "queued_tokens": 700,
    "kv": {"slots": 8, "free_slots": 0},
    "link": {"replicas": 2, "breakers": {}},
}
SECOND: dict[str, Any] = {
    "running": 1,
    "waiting": 0,
    "queued_tokens": 0,
    "kv": {"slots": 8, "free_slots": 6},
    "link": {"replicas": 1},
}


def test_several_targets_are_summed_and_the_fullest_is_seen() -> None:
    load = target_load({**FIRST, "replicas": [FIRST, SECOND]})
    assert load == TargetLoad(2, 5, 2, 700, 16, 10, 1.0, 2)


def test_one_target_without_a_draft() -> None:
    assert target_load({**SECOND, "link": None}) == TargetLoad(1, 1, 0, 0, 8, 2, 0.25, None)


def test_a_draft_scaled_to_none_is_0_and_not_absent() -> None:
    assert target_load({**SECOND, "link": {"replicas": 0}}).num_draft_replicas == 0


def test_what_is_not_known_has_no_sample() -> None:
    registry = CollectorRegistry()
    collector = LoadCollector(registry)
    collector.load = target_load(FIRST)
    assert "rag_kv_use_max_ratio 1.0" in generate_latest(registry).decode()
    assert "rag_draft_replicas 2.0" in generate_latest(registry).decode()
    collector.load = None
    shown = generate_latest(registry).decode().splitlines()
    assert [line for line in shown if not line.startswith("#")] == []
