"""The Serve application ``rag``: composed for a Serve config, or run on this machine."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from deployments.cluster import StartError, check_port, start_ray, starts_own_ray
from deployments.options import (
    APPLICATION,
    DeploymentName,
    check_scaling,
    deployment_options,
    has_autoscaling,
    has_draft,
    logging_options,
)
from rag_service.auth import check_exposure
from rag_service.config import Settings

READY_SECONDS = 300.0
POLL_SECONDS = 0.25
DELETING_SECONDS = 180.0
FAILED_START = "A replica failed to start"
"""How Serve's status message begins after a constructor has raised."""
EXCEPTION_LINE = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*): (.+)")
OWN_PACKAGES = ("rag_service", "retrieval", "generation", "deployments")
MAX_CONSTRUCTOR_TRIES = 3

logger = logging.getLogger(__name__)


def build_app(args: Mapping[str, Any] | None = None) -> Application:
    """What a Serve config names as ``import_path: deployments.app:build_app``; ``args`` are settings.

    The environment of the process that builds (``RAG_SERVICE_*``: keys, folders) lies below ``args``.
    Raises ``rag_service.config.ConfigError``, so a bad config is refused before it replaces a good one.
    """
    return compose(Settings.load(None, args or {}))


def compose(settings: Settings, target: Application | None = None) -> Application:
    """The application of all deployments. ``target`` replaces Target and Draft (tests bring a stand-in)."""
    from deployments.gateway import GatewayIngress
    from deployments.recorder import RecorderReplica
    from deployments.reranker import RerankerReplica
    from deployments.retriever import RetrieverReplica

    check_scaling(settings)
    retriever = deploy(settings, "Retriever", RetrieverReplica).bind(settings)
    reranker = deploy(settings, "Reranker", RerankerReplica).bind(settings)
    recorder = deploy(settings, "Recorder", RecorderReplica).bind(settings)
    generator = target if target is not None else build_generator(settings)
    gateway = deploy(settings, "Gateway", GatewayIngress)
    return gateway.bind(settings, retriever, reranker, generator, recorder)


def build_generator(settings: Settings) -> Application:
    """Target, with Draft's handle where there is a draft."""
    from deployments.draft import build_draft
    from deployments.target import build_target

    return build_target(settings, build_draft(settings) if has_draft(settings) else None)


def deploy(settings: Settings, name: DeploymentName, replica: type[Any]) -> serve.Deployment:
    """``replica`` as a Serve deployment with the options that the settings give it."""
    options = deployment_options(settings, name)
    return serve.deployment(**options, max_constructor_retry_count=MAX_CONSTRUCTOR_TRIES)(replica)


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service started by ``run``. ``url`` has no trailing slash."""

    url: str
    owns_ray: bool

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Let running requests end for ``grace_seconds``, then stop; safe to call twice.

        A Ray that was there before is left running, and replicas there go on draining by themselves.
        """
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):
            serve.delete(APPLICATION, _blocking=False)
            ends_at = time.monotonic() + grace_seconds
            while APPLICATION in serve.status().applications and time.monotonic() < ends_at:
                time.sleep(POLL_SECONDS)
        if self.owns_ray:
            ray.shutdown()

    def __enter__(self) -> RunningService:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def run(
    settings: Settings,
    on_ready: Callable[[RunningService], None] | None = None,
    *,
    address: str | None = None,
    application: Application | None = None,
    ready_seconds: float = READY_SECONDS,
) -> RunningService:
    """Start the whole service, wait until ``/readyz`` says yes, call ``on_ready``, return the service.

    ``address``: a Ray to use; None: Ray's ``RAY_ADDRESS``, else a private one. ``application`` replaces what
    ``compose(settings)`` gives. Raises ``StartError`` or ``ConfigError``, each one sentence; nothing is left
    running then.
    """
    check_scaling(settings)
    check_exposure(settings)
    host, port = settings.service.host, settings.service.port
    if starts_own_ray(address):
        port = check_port(host, port)
    owns_ray = start_ray(settings, address)
    _refuse_second()
    service = RunningService(_url(host, port), owns_ray)
    try:
        log = LoggingConfig(**logging_options())
        service = RunningService(_start_serve(host, port, log), owns_ray)
        app = application if application is not None else compose(settings)
        target = serve.RunTarget(app, APPLICATION, "/", log, not has_autoscaling(settings))
        serve.run_many(
            [target], wait_for_applications_running=False, wait_for_ingress_deployment_creation=False
        )
        _wait(service.url, ready_seconds)
    except BaseException:
        service.stop(grace_seconds=2.0)
        raise
    if on_ready is not None:
        on_ready(service)
    return service


def _start_serve(host: str, port: int, log: LoggingConfig) -> str:
    """Serve's address: a new one, or that of the Serve that runs on this Ray already, which cannot move."""
    running = _http_of_running_serve()
    if running is None:
        port = check_port(host, port)
        serve.start(http_options={"host": host, "port": port, "keep_alive_timeout_s": 75}, logging_config=log)
        return _url(host, port)
    if port not in (0, running[1]):
        raise StartError(
            f"Serve runs on this Ray already, on port {running[1]}; take that port, or shut that Serve down."
        )
    return _url(*running)


def _http_of_running_serve() -> tuple[str, int] | None:
    try:
        client = _get_global_client()
    except RayServeException:
        return None
    return (str(client.http_config.host), int(client.http_config.port)) if client else None


def _refuse_second() -> None:
    """Raise ``StartError`` when the application runs on this Ray already; wait for one that is being deleted."""
    ends_at = time.monotonic() + DELETING_SECONDS
    with contextlib.suppress(RayServeException):
        while (running := serve.status().applications.get(APPLICATION)) is not None:
            if running.status != "DELETING" or time.monotonic() > ends_at:
                raise StartError(
                    f"A Serve application {APPLICATION!r} runs on this Ray already; stop it first "
                    "(serve.delete), or start without RAY_ADDRESS for a Ray of its own."
                )
            time.sleep(POLL_SECONDS)


def _wait(url: str, seconds: float) -> None:
    """Return once ``/readyz`` answers 200. Raises ``StartError`` with the reason when it does not."""
    ends_at = time.monotonic() + seconds
    reason = "nothing has answered yet"
    # No proxy from the environment: this is the machine's own address.
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        while time.monotonic() < ends_at:
            failure = deploy_failure()
            if failure:
                raise StartError(failure)
            try:
                response = client.get(f"{url}/readyz")
                if response.status_code == 200:
                    return
                reason = " ".join(response.text.split())[:300]
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
            time.sleep(POLL_SECONDS)
    raise StartError(f"The service was not ready after {seconds:.0f} seconds: {reason}.")


def deploy_failure() -> str | None:
    """Why the application cannot start, in one sentence; None while it may still.

    On one machine a replica whose constructor raises will raise again, so its first failure is told at once
    instead of after Serve's retries. A draft that cannot start is no reason: without it the service is
    slower and otherwise the same.
    """
    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return None
    for name, deployment in application.deployments.items():
        failed = deployment.status in ("DEPLOY_FAILED", "UNHEALTHY") or FAILED_START in deployment.message
        if failed and name != "Draft":
            return f"{name} cannot start: {last_error(deployment.message)}"
    if application.status == "DEPLOY_FAILED" and not application.deployments:
        return f"The application cannot start: {last_error(application.message)}"
    return None


def last_error(message: str) -> str:
    """The sentence of the exception that a traceback ends with, behind its class unless it is our own."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    raised = [found for line in lines if (found := EXCEPTION_LINE.match(line))]
    if raised:
        kind, sentence = raised[-1].groups()
        package, _, name = kind.rpartition(".")
        return sentence if package.split(".")[0] in OWN_PACKAGES else f"{name}: {sentence}"
    return lines[-1].strip() if lines else "no reason is given"


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
