"""Our settings as a Ray Serve config file, and back.

``rag-service config build`` writes such a file; ``serve deploy`` and ``rag-service serve --config`` take it. In
it, ``args`` are our settings and the ``deployments`` list is Serve's own, so that replicas, processors and GPUs
can be changed by whoever knows Serve; read back, that list wins, as it does in Serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr

from rag_service.config import ConfigError, Settings

IMPORT_PATH = "deployments.app:build_app"
KEEP_ALIVE_SECONDS = 75
PROXY_MARGIN_SECONDS = 30.0
"""Serve's proxy cuts a stream without an error event: the service's own deadline must strike well before."""

_AUTOSCALING_NAMES = {
    "min_replicas": "min_replicas",
    "max_replicas": "max_replicas",
    "target_ongoing_requests": "target_ongoing_requests",
    "queued_tokens": "target_queued_tokens",
    "kv_use": "target_kv_use",
    "reply_share": "target_reply_share",
    "min_acceptance": "min_acceptance_rate",
    "upscale_delay_s": "upscale_delay_seconds",
    "downscale_delay_s": "downscale_delay_seconds",
}
_SCALING_NAMES = ("num_replicas", "max_ongoing_requests", "max_queued_requests")
_ACTOR_NAMES = ("num_cpus", "num_gpus", "resources")


def build_serve_config(settings: Settings, deployments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A Serve config: what was set of ``settings`` as ``args``, and Serve's options of each deployment.

    Scaling stands in ``deployments`` alone, where a change takes effect without a restart of replicas. Secrets
    are left out: give them to the cluster's processes as ``RAG_SERVICE_*`` variables.
    """
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": settings.service.host,
            "port": settings.service.port,
            "request_timeout_s": settings.service.request_deadline_seconds + PROXY_MARGIN_SECONDS,
            "keep_alive_timeout_s": KEEP_ALIVE_SECONDS,
        },
        "logging_config": {"encoding": "JSON", "log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "rag",
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": _arguments(settings),
                "deployments": [dict(options) for options in deployments],
            }
        ],
    }


def _arguments(settings: Settings) -> dict[str, Any]:
    """What was set, less what Serve's own list says; a draft without replicas is in no list, so it stays."""
    values = explicit_values(settings)
    scaling = {*_SCALING_NAMES, *_ACTOR_NAMES, "autoscaling"}
    kept = {
        name: {key: value for key, value in section.items() if key not in scaling}
        for name, section in values.pop("deployments", {}).items()
    }
    draft = settings.deployments.draft
    if draft.num_replicas == 0 and draft.autoscaling is None:
        kept["draft"] = {**kept.get("draft", {}), "num_replicas": 0}
    kept = {name: section for name, section in kept.items() if section}
    return {**values, "deployments": kept} if kept else values


def explicit_values(settings: BaseModel) -> dict[str, Any]:
    """Plain nested values of what was set (not defaulted), without secrets."""
    values: dict[str, Any] = {}
    for name in sorted(settings.model_fields_set):
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            continue
        if isinstance(value, BaseModel):
            below = explicit_values(value)
            if below:
                values[name] = below
            continue
        values[name] = settings.model_dump(mode="json", include={name})[name]
    return values


def has_secrets(settings: BaseModel) -> bool:
    """Whether a secret is set anywhere in the settings."""
    values = [getattr(settings, name) for name in type(settings).model_fields]
    return any(
        isinstance(value, SecretStr) or (isinstance(value, BaseModel) and has_secrets(value))
        for value in values
    )


def load_settings(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """``Settings.load`` that also takes a Serve config file. Raises ``ConfigError``."""
    document = _serve_document(path) if path else None
    if document is None:
        return Settings.load(path, overrides)
    merged = _from_serve(document, path)
    for name, value in (overrides or {}).items():
        section, key = name.split(".", 1)
        merged.setdefault(section, {})[key] = value
    return Settings.load(None, merged)


def _serve_document(path: Path) -> Mapping[str, Any] | None:
    """The file's content when it is a Serve config; None leaves it, and its errors, to ``Settings.load``."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return document if isinstance(document, dict) and "applications" in document else None


def _from_serve(document: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    applications = document["applications"] or []
    ours = [
        item for item in applications if isinstance(item, dict) and item.get("import_path") == IMPORT_PATH
    ]
    if len(ours) != 1:
        raise ConfigError(
            f"The Serve config {path} has {len(ours)} applications {IMPORT_PATH}; it needs one."
        )
    values: dict[str, Any] = {
        name: dict(section) if isinstance(section, dict) else section
        for name, section in (ours[0].get("args") or {}).items()
    }
    http = document.get("http_options") or {}
    service = {name: http[name] for name in ("host", "port") if name in http}
    values["service"] = {**values.get("service", {}), **service}
    scaled = {item["name"].lower(): _deployment(item) for item in ours[0].get("deployments") or []}
    known = dict(values.get("deployments", {}))
    values["deployments"] = {
        name: {**known.get(name, {}), **scaled.get(name, {})} for name in known.keys() | scaled.keys()
    }
    return values


def _deployment(options: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of Serve's ``deployments`` in our names."""
    actor = options.get("ray_actor_options") or {}
    values = {name: options[name] for name in _SCALING_NAMES if options.get(name) is not None}
    values.update({name: actor[name] for name in _ACTOR_NAMES if actor.get(name) is not None})
    scaling = options.get("autoscaling_config")
    if scaling:
        # A policy's arguments are the aims by signal, and what else it takes.
        arguments = (scaling.get("policy") or {}).get("policy_kwargs") or {}
        told = {**scaling, **arguments, **(arguments.get("aims") or {})}
        values["autoscaling"] = {
            ours: told[theirs] for theirs, ours in _AUTOSCALING_NAMES.items() if theirs in told
        }
    return values
