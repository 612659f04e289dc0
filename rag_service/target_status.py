"""Reading what ``GeneratorBackend.status()`` says of the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def targets_of(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Each target's own status: the parts of ``replicas`` where there are several, else the whole."""
    return list(status.get("replicas") or [status])


def kv_slots(target: Mapping[str, Any]) -> tuple[int, int]:
    """``(slots, slots in use)`` of one target's key-value cache; zeros where it does not say."""
    kv = target.get("kv") or {}
    total = int(kv.get("slots", 0))
    return total, total - int(kv.get("free_slots", total))
