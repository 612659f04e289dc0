"""Settings → options of the Serve deployments."""

from __future__ import annotations

from typing import Any, Literal, get_args

from deployments.autoscaling import BUSY_SHARE, KV_USE, QUEUED_TOKENS, REPLY_SHARE
from rag_service.config import AutoscalingConfig, ConfigError, DeploymentConfig, Settings

APPLICATION = "rag"
"""Name of the Serve application."""

DeploymentName = Literal["Gateway", "Retriever", "Reranker", "Target", "Draft", "Recorder"]
DEPLOYMENT_NAMES: tuple[DeploymentName, ...] = get_args(DeploymentName)

POLICY = "deployments.autoscaling:SignalPolicy"
BUSY_ENOUGH = 0.5
"""Of a draft that computes less than this share of the time, late replies are no reason for another."""
DRAIN_MARGIN_SECONDS = 10.0
HEALTH_PERIOD_SECONDS = 5.0
HEALTH_TIMEOUT_SECONDS = 10.0
"""A replica that has not answered for so long three times in a row is replaced: a frozen one after about 40 s. With
30 s here it took 107 s, and its requests hung as long."""


def config_of(settings: Settings, name: DeploymentName) -> DeploymentConfig:
    """The section of one deployment."""
    section: DeploymentConfig = getattr(settings.deployments, name.lower())
    return section


def check_scaling(settings: Settings) -> None:
    """Refuse what cannot work. Raises ``ConfigError`` naming the setting.

    Recorder holds the running figures, and the embedded index locks its folder: of these there is one. Only
    Draft may be absent.
    """
    for name in DEPLOYMENT_NAMES:
        path = f"deployments.{name.lower()}"
        least, most = _bounds(config_of(settings, name))
        if least > most:
            raise ConfigError(f"{path}.autoscaling has min_replicas {least} above max_replicas {most}.")
        if least == 0 and name != "Draft":
            raise ConfigError(f"{path} needs at least one replica; only the draft may have none.")
        if name == "Recorder" and most > 1:
            raise ConfigError(f"{path} must have exactly one replica: it holds the running figures.")
        if name == "Retriever" and most > 1 and settings.retrieval.index.url is None:
            raise ConfigError(
                f"{path} must have exactly one replica with the embedded index, which one process locks; "
                "set retrieval.index.url to a Qdrant server for more."
            )


def has_draft(settings: Settings) -> bool:
    """Whether a Draft deployment is part of the application: it may have replicas, and a model for them."""
    if _bounds(settings.deployments.draft)[1] == 0:
        return False
    if settings.draft.draft is not None:
        return True
    from rag_service.draft_choice import draft_config  # loads torch: only where it decides

    return draft_config(settings) is not None


def deployment_options(settings: Settings, name: DeploymentName) -> dict[str, Any]:
    """Keyword arguments of ``serve.deployment`` for one deployment; JSON-compatible, so they fit a Serve
    config's ``deployments`` list as well."""
    config = config_of(settings, name)
    options: dict[str, Any] = {
        "name": name,
        "ray_actor_options": _actor_options(settings, name, config),
        "max_ongoing_requests": config.max_ongoing_requests,
        "max_queued_requests": config.max_queued_requests,
        "health_check_period_s": HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_timeout_s": settings.service.request_deadline_seconds + DRAIN_MARGIN_SECONDS,
    }
    if name == "Gateway":
        # Serve's own rejection has a plain-text body; the gateway's limits, in the API's shape, come first.
        options["backpressure_config"] = {"status_code": 429, "retry_after_s": 1.0}
    options.update(scaling_options(name, config))
    return options


def scaling_options(name: DeploymentName, config: DeploymentConfig) -> dict[str, Any]:
    """``num_replicas`` or ``autoscaling_config``, in Serve's own names."""
    scaling = config.autoscaling
    if scaling is None:
        return {"num_replicas": config.num_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "initial_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "target_ongoing_requests": scaling.target_ongoing_requests,
            "upscale_delay_s": scaling.upscale_delay_seconds,
            "downscale_delay_s": scaling.downscale_delay_seconds,
            **_policy(name, scaling),
        }
    }


def _policy(name: DeploymentName, scaling: AutoscalingConfig) -> dict[str, Any]:
    """Target and Draft scale by signals of their own beside calls; the others by calls, Serve's own way."""
    if name == "Target":
        aims = {QUEUED_TOKENS: scaling.target_queued_tokens, KV_USE: scaling.target_kv_use}
        arguments: dict[str, Any] = {"aims": aims}
    elif name == "Draft":
        aims = {REPLY_SHARE: scaling.target_reply_share}
        limits = {REPLY_SHARE: [BUSY_SHARE, BUSY_ENOUGH]}
        arguments = {"aims": aims, "limits": limits, "min_acceptance": scaling.min_acceptance_rate}
    else:
        return {}
    return {"policy": {"policy_function": POLICY, "policy_kwargs": arguments}}


def logging_options() -> dict[str, Any]:
    """How replicas, controller and proxy log: one JSON object a line. Requests have a log of their own."""
    return {"encoding": "JSON", "log_level": "WARNING", "enable_access_log": False}


def has_autoscaling(settings: Settings) -> bool:
    return any(config_of(settings, name).autoscaling is not None for name in DEPLOYMENT_NAMES)


def total_cpus(settings: Settings) -> float:
    """Logical CPUs that the application reserves at its largest."""
    configs = [config_of(settings, name) for name in DEPLOYMENT_NAMES]
    return sum(config.num_cpus * _bounds(config)[1] for config in configs)


def _bounds(config: DeploymentConfig) -> tuple[int, int]:
    if config.autoscaling is not None:
        return config.autoscaling.min_replicas, config.autoscaling.max_replicas
    return config.num_replicas, config.num_replicas


def _actor_options(settings: Settings, name: DeploymentName, config: DeploymentConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": config.num_cpus}
    if config.num_gpus:
        options["num_gpus"] = config.num_gpus
    if config.resources:
        options["resources"] = dict(config.resources)
    threads = _num_threads(settings, name)
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if threads:
        # Ray derives OMP_NUM_THREADS from num_cpus, which says where a replica fits and not how it computes.
        environment["OMP_NUM_THREADS"] = str(threads)
    options["runtime_env"] = {"env_vars": environment}
    return options


def _num_threads(settings: Settings, name: DeploymentName) -> int:
    """Threads of one replica's forward pass; 0 leaves the library's choice."""
    if name == "Target":
        return settings.engine.target.num_threads
    if name == "Draft":
        return settings.draft.draft.num_threads if settings.draft.draft else 1
    if name == "Retriever":
        return settings.retrieval.embedder.num_threads or 1
    if name == "Reranker":
        return settings.retrieval.reranker.num_threads or 1
    return 1
