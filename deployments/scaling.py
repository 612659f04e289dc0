"""Replicas of the running application: how many there are, what they do, and changing their number."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any, cast, get_args

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from deployments.cluster import StartError, start_ray
from deployments.options import APPLICATION, DeploymentName, check_scaling
from rag_service.config import ConfigError, Settings

POLL_SECONDS = 0.2
STATUS_SECONDS = 5.0
PROBE_SECONDS = 5.0


class NotRunning(RuntimeError):
    """There is no such application or deployment; ``str()`` is one clear sentence."""


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """One deployment as Serve sees it, and what its replicas say of themselves (plain JSON)."""

    name: str
    state: str
    num_running: int
    num_starting: int
    num_stopping: int
    message: str
    replicas: tuple[dict[str, Any], ...] = ()


def connect(settings: Settings, address: str | None = None) -> None:
    """Reach the Ray that runs the service: ``address``, Ray's ``RAY_ADDRESS``, or the one on this machine.

    Raises ``StartError`` when there is none.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    _probe(wanted)
    start_ray(settings, wanted)


def scale(settings: Settings, name: str, num_replicas: int) -> None:
    """Ask for ``num_replicas`` of a deployment; running requests go on. Returns before they are there.

    ``settings`` are the service's: they say what may be scaled. Serve refuses 0 in a deployment's options, and
    takes it here: a draft that runs may go to none and come back. Raises ``ConfigError`` for what may not, and
    ``NotRunning``.
    """
    if name not in get_args(DeploymentName):
        raise ConfigError(
            f"There is no deployment {name!r}; there are {', '.join(get_args(DeploymentName))}."
        )
    section = getattr(settings.deployments, name.lower())
    changed = section.model_copy(update={"num_replicas": num_replicas, "autoscaling": None})
    wanted = settings.deployments.model_copy(update={name.lower(): changed})
    check_scaling(settings.model_copy(update={"deployments": wanted}))
    if name not in _application().deployments:
        raise NotRunning(f"{name} is not part of the running application; start it with that deployment.")
    # Serve offers this as a call of its dashboard's REST API only; a private Ray runs no dashboard.
    controller = cast(Any, _get_global_client())._controller
    try:
        ray.get(controller.update_deployment_replicas.remote(DeploymentID(name, APPLICATION), num_replicas))
    except ray.exceptions.RayTaskError as error:
        raise NotRunning(f"{name} cannot be scaled: {str(error.cause).splitlines()[0]}") from None


def wait_for(name: str, num_replicas: int, seconds: float = 300.0) -> None:
    """Return once exactly ``num_replicas`` run and none starts or stops. Raises ``TimeoutError``."""
    ends_at = time.monotonic() + seconds
    while True:
        found = next((state for state in states() if state.name == name), None)
        if found and (found.num_running, found.num_starting, found.num_stopping) == (num_replicas, 0, 0):
            return
        if time.monotonic() > ends_at:
            shown = f"{found.num_running} run ({found.message or found.state})" if found else "it is gone"
            raise TimeoutError(f"{name} did not come to {num_replicas} replicas in {seconds:.0f} s: {shown}.")
        time.sleep(POLL_SECONDS)


def states(with_replicas: bool = False) -> list[DeploymentState]:
    """Every deployment of the application. ``with_replicas`` also asks each replica for its ``status()``.

    Raises ``NotRunning``.
    """
    found = []
    for name, deployment in _application().deployments.items():
        counts = {
            str(getattr(key, "value", key)): number for key, number in deployment.replica_states.items()
        }
        found.append(
            DeploymentState(
                name=name,
                state=str(getattr(deployment.status, "value", deployment.status)),
                num_running=counts.get("RUNNING", 0),
                num_starting=counts.get("STARTING", 0) + counts.get("UPDATING", 0),
                num_stopping=counts.get("STOPPING", 0),
                message=deployment.message,
                replicas=_replicas(name) if with_replicas else (),
            )
        )
    return found


def _probe(address: str) -> None:
    """Ray itself tries an address where nothing listens for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return  # "auto", or Ray's own kind of URL
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise StartError(f"No Ray answers at {address}: {error.strerror or error}.") from None


def _application() -> Any:
    try:
        application = serve.status().applications.get(APPLICATION)
    except RayServeException:
        application = None
    if application is None:
        raise NotRunning(f"No application {APPLICATION!r} runs on this Ray.")
    return application


def _replicas(name: str) -> tuple[dict[str, Any], ...]:
    if name == "Gateway":
        return ()  # it speaks HTTP
    try:
        handle = serve.get_deployment_handle(name, APPLICATION)
        found = handle.broadcast("status").results(timeout_s=STATUS_SECONDS, return_exceptions=True)
    except Exception:
        return ()
    return tuple(status for status in found if isinstance(status, dict))
