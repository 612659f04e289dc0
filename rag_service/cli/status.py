"""``rag-service status``: is the service up, and what is it doing."""

from __future__ import annotations

from typing import Any

import typer

from rag_service.cli.client import Client, KeyOption, UrlOption
from rag_service.cli.output import EXIT_FAILED, JsonFlag, emit


def status(url: UrlOption = None, api_key: KeyOption = None, as_json: JsonFlag = False) -> None:
    """Tell whether the service is ready, and acceptance and latency so far. Exit status 1: not ready."""
    with Client(url, api_key) as client:
        ready = client.call("GET", "/readyz", accept=(503,))
        report = client.call("GET", "/v1/acceptance", accept=(401, 403, 503))
    is_ready = _is_ready(ready)
    domains = report.get("domains") or {}
    result = {"url": client.url, "ready": is_ready, "readiness": ready, "domains": domains}
    emit(result, _describe(client.url, is_ready, ready, domains), as_json=as_json)
    if not is_ready:
        raise typer.Exit(EXIT_FAILED)


def _is_ready(body: Any) -> bool:
    return isinstance(body, dict) and "error" not in body and body.get("status") in ("ready", "ok")


def _describe(url: str, is_ready: bool, body: Any, domains: dict[str, Any]) -> str:
    lines = [f"{url}: {'ready' if is_ready else 'not ready'}"]
    if isinstance(body, dict) and not is_ready:
        missing = body.get("not_ready") or {"service": body.get("error", {}).get("message", "says no more")}
        lines += [f"  {name}: {reason}" for name, reason in missing.items()]
    for name, figures in domains.items():
        rate = figures.get("acceptance_rate")
        latency = (figures.get("latency_seconds") or {}).get("p95")
        shown = "none" if rate is None else f"{rate:.2f}"
        slow = "none" if latency is None else f"{latency:.2f} s"
        lines.append(f"  {name}: {figures.get('num_requests', 0)} requests, α {shown}, P95 {slow}")
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    """Add the ``status`` command."""
    app.command("status")(status)
