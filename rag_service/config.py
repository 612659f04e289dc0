"""The service's settings, and the only reader of environment variables and YAML.

Precedence, lowest first: defaults, the YAML file, environment, overrides. An environment variable names a
setting by its path with two underscores between levels (``RAG_SERVICE_PROMPT__TOP_K=5``); its value is read
as YAML. Two more are folders: ``RAG_SERVICE_DATA`` and ``RAG_SERVICE_CACHE``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator

from generation.config import DraftConfig, EngineConfig, Frozen
from rag_service.setting_names import explained
from retrieval.config import RetrievalConfig

ENVIRONMENT_PREFIX = "RAG_SERVICE_"
OTHER_DOMAIN = "other"
"""Where figures of requests outside the configured domains are counted."""

CitationMode = Literal["attributed", "model", "off"]
DEFAULT_SYSTEM = "Answer the question in one or two sentences, using only the sources."
"""The packaged draft is distilled on this text: changing it costs acceptance."""


class ConfigError(ValueError):
    """Settings that cannot be used; ``str()`` is one clear sentence."""


def data_folder() -> Path:
    """Where the service keeps what must last: index, request log, API keys."""
    return _folder("DATA", "~/.local/share/rag-service")


def cache_folder() -> Path:
    """Where the service keeps what can be fetched again: models."""
    return _folder("CACHE", "~/.cache/rag-service")


class ServiceConfig(Frozen):
    """The HTTP face."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    domains: tuple[str, ...] = ("finance", "medical", "legal", "software", "general")
    """Closed list: figures are kept by domain, so their number must stay bounded."""
    model_name: str | None = None
    """The id that ``/v1/models`` lists; None: the last part of the target's name."""
    default_temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    default_max_tokens: int = Field(default=256, ge=1)
    max_tokens_limit: int = Field(default=4096, ge=1)
    """The largest ``max_tokens`` a request may ask for."""
    max_choices: int = Field(default=8, ge=1)
    max_question_chars: int = Field(default=32_768, ge=1)
    """Longest single message or search query; what fits the model's context is the target's to say."""
    max_body_bytes: int = Field(default=512 * 1024, ge=1024)
    """Largest JSON body of a question; documents have their own limit."""
    max_upload_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    request_deadline_seconds: float = Field(default=120.0, gt=0.0)
    """A request is answered or ended with an error by then. Keep it inside Serve's ``request_timeout_s``."""
    heartbeat_seconds: float = Field(default=5.0, gt=0.0)
    """A stream with nothing to say sends a comment this often."""
    cors_origins: tuple[str, ...] = ()
    """Origins of other sites whose pages may call the API; ``*`` for all."""

    @field_validator("domains")
    @classmethod
    def _plain_domains(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        for domain in domains:
            if (
                not domain
                or not domain.replace("-", "").replace("_", "").isalnum()
                or domain != domain.lower()
            ):
                raise ValueError(f"{domain!r} is no domain name: use lower-case letters, digits, - and _")
        if len(set(domains)) != len(domains) or not domains:
            raise ValueError("name every domain once, and at least one")
        return domains


class AuthConfig(Frozen):
    """Who may call. Without keys only a loopback address may be served."""

    mode: Literal["auto", "required"] = "auto"
    """``auto`` asks for a key as soon as one exists; ``required`` always."""
    keys_file: Path | None = None
    """Hashed API keys; None: ``api-keys.json`` in the data folder."""
    public_metrics: bool = True
    """Answer ``/metrics`` without a key, as Prometheus expects; it holds figures by domain, no text."""


class LimitsConfig(Frozen):
    """How much may be asked. None is unlimited; a key's own limits go before these."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and generated tokens together, by tenant."""
    storage: str = "memory://"
    """A URI of the ``limits`` library; ``redis://host:6379`` shares the counts between gateways."""
    max_in_flight: int = Field(default=32, ge=1)
    """Requests one gateway replica works on at once; beyond that it answers 429 with Retry-After."""
    answer_within_seconds: float | None = Field(default=None, gt=0)
    """A request that, by the measured rate, would take longer is refused with 429 at once, so that under overload
    those taken are still in time. None: `service.request_deadline_seconds`."""


class PromptConfig(Frozen):
    """How passages become a prompt and an answer gets its citations."""

    system: str = DEFAULT_SYSTEM
    top_k: int = Field(default=3, ge=1, le=50)
    """Passages in the prompt."""
    passage_tokens: int = Field(default=700, ge=16)
    history_tokens: int = Field(default=1024, ge=0)
    """Earlier turns in the prompt; the oldest go first."""
    candidates: int = Field(default=30, ge=1, le=500)
    """Passages searched for, before reranking."""
    rerank: bool = True
    min_score: float | None = None
    """Passages the last ranking stage scores lower are left out."""
    rewrite: bool = True
    """Make the last turn of a conversation a search query of its own from the turns before it."""
    stop_at_next_question: bool = True
    """End an answer where the model goes on to make up the next question, as small models do."""
    citations: CitationMode = "attributed"
    """``attributed``: a finished sentence without a marker gets the marker of the source that supports it;
    ``model``: only markers that the model wrote; ``off``: none."""
    attribution_threshold: float = Field(default=0.6, ge=0.0, le=1.0)
    """Share of a sentence's content words that its source must contain."""


class TelemetryConfig(Frozen):
    """What is kept of requests."""

    folder: str | None = None
    """Request log: a local folder or an fsspec URL; None: ``requests`` in the data folder."""
    flush_seconds: float = Field(default=5.0, gt=0.0)
    flush_rows: int = Field(default=512, ge=1)
    keep_text: bool = False
    """Keep questions and answers. Off: neither is ever written anywhere."""
    retention_days: int | None = Field(default=None, ge=1)
    baseline_file: Path | None = None
    """Gated acceptance rates by domain that drift is judged against; `null`: those of the pair's gate record."""
    trace: bool = False
    """Spans of each request over gateway, search, rerank, prefill and rounds, by OpenTelemetry. Off: they cost
    nothing."""
    trace_exporter: Literal["otlp", "console"] = "otlp"
    """``otlp``: to a collector, by HTTP; ``console``: into the log of each replica."""
    trace_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """The collector's address for traces, path included; None: what OTEL_EXPORTER_OTLP_* say, else port 4318 of
    the same machine."""
    trace_sample: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of requests traced; one that comes with a ``traceparent`` follows its caller's choice."""


class AutoscalingConfig(Frozen):
    """Bounds and aims of Serve's autoscaler for one deployment; the most pressed aim decides."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=4, ge=1)
    target_ongoing_requests: float = Field(default=4.0, gt=0.0)
    target_queued_tokens: float = Field(default=4096.0, gt=0.0)
    target_kv_use: float = Field(default=0.85, gt=0.0, le=1.0)
    target_reply_share: float = Field(default=0.8, gt=0.0)
    min_acceptance_rate: float = Field(default=0.2, ge=0.0, le=1.0)
    upscale_delay_seconds: float = Field(default=10.0, ge=0.0)
    downscale_delay_seconds: float = Field(default=300.0, ge=0.0)


class DeploymentConfig(Frozen):
    """How one deployment is spread."""

    num_replicas: int = Field(default=1, ge=0)
    autoscaling: AutoscalingConfig | None = None
    """Given: replaces ``num_replicas``."""
    num_cpus: float = Field(default=0.2, ge=0.0)
    num_gpus: float = Field(default=0.0, ge=0.0)
    resources: Mapping[str, float] = Field(default_factory=dict)
    max_ongoing_requests: int = Field(default=64, ge=1)
    max_queued_requests: int = Field(default=128, ge=-1)


class GatewayDeploymentConfig(DeploymentConfig):
    """How the gateway is spread, and how it treats a target that is lost."""

    retry_unstarted: bool = True
    """A request whose target or gateway replica dies before its first token is begun again on another."""


class DeploymentsConfig(Frozen):
    """The six deployments of the Serve application."""

    gateway: GatewayDeploymentConfig = GatewayDeploymentConfig(num_cpus=0.1, max_ongoing_requests=256)
    retriever: DeploymentConfig = DeploymentConfig()
    reranker: DeploymentConfig = DeploymentConfig()
    target: DeploymentConfig = DeploymentConfig(num_cpus=0.5)
    draft: DeploymentConfig = DeploymentConfig(num_cpus=0.5, max_ongoing_requests=512)
    recorder: DeploymentConfig = DeploymentConfig(num_cpus=0.1, max_ongoing_requests=512)


class Settings(Frozen):
    """Everything that can be set, frozen. See ``Settings.load``."""

    service: ServiceConfig = ServiceConfig()
    auth: AuthConfig = AuthConfig()
    limits: LimitsConfig = LimitsConfig()
    prompt: PromptConfig = PromptConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    engine: EngineConfig = EngineConfig()
    draft: DraftConfig = DraftConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    deployments: DeploymentsConfig = DeploymentsConfig()
    data_folder: Path = Field(default_factory=data_folder)
    cache_folder: Path = Field(default_factory=cache_folder)

    @classmethod
    def load(cls, path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
        """Settings from a YAML file, the environment and ``overrides`` (nested, or ``service.port``).

        Raises ``ConfigError`` naming the setting, and the nearest known name for an unknown one.
        """
        values: dict[str, Any] = {}
        for layer in (_read_yaml(path) if path else {}, _environment(), _nested(overrides or {})):
            values = _merged(values, layer)
        return cls.parse(values)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from nested plain values (a Serve config's ``args``). Raises ``ConfigError``."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explained(error, cls)) from None

    @property
    def model_name(self) -> str:
        """The id of the served model, as ``/v1/models`` lists it."""
        return self.service.model_name or Path(self.engine.target.model).name.removesuffix(".gguf").lower()

    @property
    def keys_file(self) -> Path:
        return self.auth.keys_file or self.data_folder / "api-keys.json"

    @property
    def telemetry_folder(self) -> str:
        return self.telemetry.folder or str(self.data_folder / "requests")

    def as_values(self, *, reveal: bool = False) -> dict[str, Any]:
        """Plain nested values, fit for YAML, JSON and ``Settings.parse``; secrets masked unless ``reveal``."""
        values: dict[str, Any] = _plain(self.model_dump(), reveal)
        return values


def _plain(value: Any, reveal: bool) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(below, reveal) for name, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(below, reveal) for below in value]
    if isinstance(value, SecretStr):
        return value.get_secret_value() if reveal else str(value)
    return str(value) if isinstance(value, Path) else value


def _folder(name: str, default: str) -> Path:
    return Path(os.environ.get(ENVIRONMENT_PREFIX + name) or default).expanduser()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} is no valid YAML: {_one_line(str(error))}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"The configuration {path} must be a mapping of sections.")
    return _nested({str(key): value for key, value in values.items()})


def _environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in os.environ.items():
        # Kubernetes sets RAG_SERVICE_PORT and the like for a service of our name; only "__" marks a setting.
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            try:
                values[path] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"{name} is no valid YAML value: {_one_line(str(error))}.") from None
    return _nested(values)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` → ``{"a": {"b": 1}}``; nested mappings are kept."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        for name in reversed(path.split(".")):
            value = {name: value}
        nested = _merged(nested, value)
    return nested


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def _one_line(text: str) -> str:
    return " ".join(text.split())
