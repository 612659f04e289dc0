"""``rag-service status``: is the service up, and what is it doing; ``--watch`` keeps looking."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rag_service.cli.client import Client, KeyOption, UrlOption
from rag_service.cli.output import EXIT_FAILED, EXIT_USAGE, CommandError, JsonFlag, emit
from rag_service.cli.status_table import describe
from rag_service.target_status import targets_of

NOT_TOLD = (401, 403, 404, 503)
"""Statuses of an endpoint that this caller is not told by; the rest is shown all the same."""


def status(
    url: UrlOption = None,
    api_key: KeyOption = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray", help="Also show every deployment's replicas, from the Ray here ('auto' finds it)."
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks of --watch.")] = 2.0,
    as_json: JsonFlag = False,
) -> None:
    """Tell whether the service is ready, its replicas, queue, KV use, breakers, models, acceptance and latency.

    Queue, KV use and breakers need a key of scope analyst where keys are asked for. Exit status 1: not ready.
    """
    if watch and as_json:
        raise CommandError(
            "--json prints one object and --watch many; take one of them.",
            exit_status=EXIT_USAGE,
            code="usage",
        )
    if ray_address is not None:
        _connect(ray_address)
    with Client(url, api_key) as client:
        if watch:
            _watch(client, every, with_ray=ray_address is not None)
            return
        result = look(client, with_ray=ray_address is not None)
    emit(result, describe(result), as_json=as_json)
    if not result["ready"]:
        raise typer.Exit(EXIT_FAILED)


def look(client: Client, *, with_ray: bool = False) -> dict[str, Any]:
    """Everything that is shown, once: plain JSON. Raises ``CommandError`` when the service does not answer."""
    ready = client.call("GET", "/readyz", accept=(503,))
    report = client.call("GET", "/v1/acceptance", accept=NOT_TOLD)
    doing = client.call("GET", "/v1/status", accept=NOT_TOLD)
    generator = _told(doing).get("generator") or {}
    result = {
        "url": client.url,
        "ready": _told(ready).get("status") in ("ready", "ok"),
        "readiness": ready,
        "domains": _told(report).get("domains") or {},
        "gateway": _told(doing).get("gateway"),
        "targets": targets_of(generator) if generator else [],
    }
    return {**result, "deployments": _deployments()} if with_ray else result


def _watch(client: Client, every: float, *, with_ray: bool) -> None:
    """A service that goes away is said and watched on: that is when one looks."""
    with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False, screen=False) as live:
        while True:
            live.update(_shown(client, with_ray=with_ray), refresh=True)
            time.sleep(every)


def _shown(client: Client, *, with_ray: bool) -> RenderableType:
    try:
        shown = describe(look(client, with_ray=with_ray))
    except Exception as error:
        shown = str(error)
    return Group(Text(time.strftime("%H:%M:%S")), Text(shown) if isinstance(shown, str) else shown)


def _told(body: Any) -> dict[str, Any]:
    return body if isinstance(body, dict) and "error" not in body else {}


def _connect(address: str) -> None:
    from deployments.scaling import connect
    from rag_service.config import Settings

    connect(Settings.load(), address)


def _deployments() -> list[dict[str, Any]]:
    from deployments.scaling import states

    return [
        {
            "name": found.name,
            "state": found.state,
            "num_running": found.num_running,
            "num_starting": found.num_starting,
            "num_stopping": found.num_stopping,
            "message": found.message,
        }
        for found in states()
    ]


def register(app: typer.Typer) -> None:
    """Add the ``status`` command."""
    app.command("status")(status)
