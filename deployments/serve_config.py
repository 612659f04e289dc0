"""Settings → a Serve config, the document that ``serve deploy`` and a RayService take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from deployments.options import (
    APPLICATION,
    DEPLOYMENT_NAMES,
    check_scaling,
    config_of,
    deployment_options,
    has_autoscaling,
    has_draft,
    logging_options,
)
from rag_service.config import Settings

IMPORT_PATH = "deployments.app:build_app"
PROXY_MARGIN_SECONDS = 30.0
"""Serve's proxy cuts a stream without an error event; the service's own deadline must strike well before."""


def serve_config(settings: Settings) -> dict[str, Any]:
    """A document that fits Ray's ``ServeDeploySchema``, of plain values only.

    ``args`` hold the settings that differ from their defaults: changing one restarts the replicas. Scaling
    stands in ``deployments`` alone, where a change takes effect without a restart. Secrets and this machine's
    folders are left out: the replicas read them from their own environment (``RAG_SERVICE_*``). Raises
    ``ConfigError`` for what cannot be scaled so.
    """
    check_scaling(settings)
    names = [name for name in DEPLOYMENT_NAMES if name != "Draft" or has_draft(settings)]
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": settings.service.host,
            "port": settings.service.port,
            "request_timeout_s": settings.service.request_deadline_seconds + PROXY_MARGIN_SECONDS,
            "keep_alive_timeout_s": 75,
        },
        "logging_config": logging_options(),
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": _arguments(settings),
                "external_scaler_enabled": not has_autoscaling(settings),
                "deployments": [deployment_options(settings, name) for name in names],
            }
        ],
    }


def _arguments(settings: Settings) -> dict[str, Any]:
    values = _changed(settings.model_dump(), Settings().model_dump())
    deployments = values.pop("deployments", {})
    kept: dict[str, Any] = {}
    if "retry_unstarted" in deployments.get("gateway", {}):
        kept["gateway"] = {"retry_unstarted": config_of(settings, "Gateway").model_dump()["retry_unstarted"]}
    if not has_draft(settings):
        kept["draft"] = {"num_replicas": 0}
    return {**values, "deployments": kept} if kept else values


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``values`` differs from ``defaults``, plain, without secrets."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name)
        if value == default or isinstance(value, SecretStr):
            continue
        if isinstance(value, Mapping):
            below = _changed(value, default if isinstance(default, Mapping) else {})
            if below:
                changed[name] = below
        else:
            changed[name] = _plain(value)
    return changed


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
