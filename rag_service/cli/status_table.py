"""What ``rag-service status`` prints for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rag_service.target_status import kv_slots

NOTHING = "-"


def describe(result: Mapping[str, Any]) -> RenderableType:
    """``status.look``'s result: lines of text, and tables of deployments and targets where these are known."""
    lines = "\n".join(_lines(result))
    parts: list[RenderableType] = [Text(lines)]
    if result.get("deployments"):
        parts.append(_deployments(result["deployments"]))
    if result.get("targets"):
        parts += [_targets(result["targets"]), *_breakers(result["targets"])]
    return Group(*parts) if len(parts) > 1 else lines


def _lines(result: Mapping[str, Any]) -> list[str]:
    lines = [f"{result['url']}: {'ready' if result['ready'] else 'not ready'}"]
    if not result["ready"] and isinstance(result["readiness"], dict):
        body = result["readiness"]
        missing = body.get("not_ready") or {
            "service": (body.get("error") or {}).get("message", "says no more")
        }
        lines += [f"  {name}: {reason}" for name, reason in missing.items()]
    if result.get("gateway"):
        lines.append(f"  {result['gateway'].get('num_in_flight', 0)} requests in flight at this gateway")
    for name, figures in result["domains"].items():
        latency = (figures.get("latency_seconds") or {}).get("p95")
        slow = "none" if latency is None else f"{latency:.2f} s"
        rate = _rate(figures.get("acceptance_rate"), "none")
        lines.append(f"  {name}: {figures.get('num_requests', 0)} requests, α {rate}, P95 {slow}")
    return lines


def _deployments(states: list[dict[str, Any]]) -> Table:
    table = _table("deployment", "state", "running", "starting", "stopping")
    for state in states:
        counts = (str(state[key]) for key in ("num_running", "num_starting", "num_stopping"))
        table.add_row(state["name"], state["state"].lower(), *counts)
    return table


def _targets(targets: list[dict[str, Any]]) -> Table:
    table = _table("target", "model", "draft", "drafts", "running", "waiting", "KV slots", "α", "hits")
    for target in targets:
        slots, used = kv_slots(target)
        link, lookahead = target.get("link"), target.get("lookahead") or {}
        hits, misses = lookahead.get("hits", 0), lookahead.get("misses", 0)
        table.add_row(
            str(target.get("replica") or NOTHING).split("#")[-1],
            str(target.get("target") or NOTHING),
            str(target.get("draft") or NOTHING),
            NOTHING if link is None else str(link.get("replicas", NOTHING)),
            str(target.get("running", NOTHING)),
            f"{target.get('waiting', 0)} ({target.get('queued_tokens', 0)} tokens)",
            f"{used}/{slots}" if slots else NOTHING,
            _rate(lookahead.get("alpha"), NOTHING),
            f"{hits / (hits + misses):.0%}" if hits + misses else NOTHING,
        )
    return table


def _breakers(targets: list[dict[str, Any]]) -> list[Text]:
    """One line a draft replica that some target does not ask at present."""
    states: dict[str, set[str]] = {}
    for target in targets:
        for draft, state in ((target.get("link") or {}).get("breakers") or {}).items():
            states.setdefault(draft, set()).add(state)
    found = {draft: sorted(seen - {"closed"}) for draft, seen in sorted(states.items())}
    return [Text(f"breaker of {draft}: {', '.join(seen)}") for draft, seen in found.items() if seen]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _rate(value: Any, otherwise: str) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else otherwise
