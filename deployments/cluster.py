"""The Ray that the application runs on: a private one on this machine, or one that exists already."""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
from pathlib import Path

import ray
from ray.exceptions import AuthenticationError, RayError

from deployments.options import total_cpus
from rag_service.config import Settings

OBJECT_STORE_BYTES = 200 * 2**20
"""Messages between replicas are small; only uploads are worth Ray's object store."""
MIN_FREE_BYTES = 512 * 2**20
TOKEN_FILE = Path(".ray") / "auth_token"
"""Where Ray looks for its token, below the home folder."""

KILL_FROZEN = ("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
"""A frozen replica cannot drain: without this, Serve leaves the requests it holds hanging for as long as
draining may take. Set it for the head of a cluster too."""
LOOK_AT_PROXY = ("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "2")
"""A proxy that has died is replaced after three failed looks: with Serve's ten seconds between them nobody could
connect for half a minute. For the head of a cluster too."""
PROXY_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Names what ``deployments.proxy`` puts around the HTTP proxy. For every node of a cluster that has a proxy."""

NUM_STARTS = 2
"""A loaded machine is too slow for Ray's own patience now and then."""

logger = logging.getLogger(__name__)


class StartError(RuntimeError):
    """The service cannot start; ``str()`` is one clear sentence with what to do."""


def check_port(host: str, port: int) -> int:
    """The port to serve on: ``port``, or a free one for 0. Raises ``StartError`` when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(
                    f"Port {port} on {host} is taken; free it, or choose another with --port or service.port."
                ) from None
            if error.errno == errno.EACCES:
                raise StartError(
                    f"Port {port} may not be opened by this user; choose one above 1023."
                ) from None
            raise StartError(f"{host} is no address of this machine ({error.strerror or error}).") from None
        chosen: int = probe.getsockname()[1]
        return chosen


def start_ray(settings: Settings, address: str | None = None) -> bool:
    """Start a private Ray, or connect to the one at ``address``. True when Ray was started here.

    None takes Ray's own ``RAY_ADDRESS`` where that is set. A private Ray has no dashboard, a small object
    store and as many *logical* CPUs as the application reserves, so that all replicas fit on two cores.
    Raises ``StartError``.
    """
    if ray.is_initialized():
        return False
    wanted = _wanted(address)
    _quiet()
    if wanted != "local":
        _connect(wanted)
        return False
    other = _other_ray()
    if other:
        logger.warning(
            "A Ray runs on this machine already (%s); starting a private one beside it. "
            "Set RAY_ADDRESS=auto to use that one.",
            other,
        )
    _check_space()
    _ensure_token()
    os.environ.setdefault(*KILL_FROZEN)
    os.environ.setdefault(*LOOK_AT_PROXY)
    repeats = settings.deployments.gateway.retry_unstarted
    os.environ.setdefault(PROXY_CALLBACK, f"deployments.proxy:{'repeating' if repeats else 'telling'}")
    _start_own(max(math.ceil(total_cpus(settings)) + 1, os.cpu_count() or 1))
    return True


def _start_own(num_cpus: int) -> None:
    for attempt in range(1, NUM_STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace="rag-service",
            )
            return
        except Exception as error:  # Ray's node raises a bare one when its processes are too slow
            ray.shutdown()
            too_slow = "timed out" in str(error)
            if too_slow and attempt < NUM_STARTS:
                logger.warning("Ray did not start in time; trying once more.")
                continue
            advice = (
                " The machine is too busy or short of memory: free some and try again." if too_slow else ""
            )
            raise StartError(f"Ray could not be started: {_first_line(error)}.{advice}") from error


def starts_own_ray(address: str | None = None) -> bool:
    """Whether ``start_ray(settings, address)`` would start a private Ray."""
    return not ray.is_initialized() and _wanted(address) == "local"


def _wanted(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or "local"


def _connect(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="rag-service")
    except AuthenticationError:
        raise StartError(
            f"The Ray at {address} asks for a token: put it into RAY_AUTH_TOKEN or ~/{TOKEN_FILE}, "
            "or set RAY_AUTH_MODE as that cluster has it."
        ) from None
    except (RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise StartError(f"No Ray answers at {address}: {_first_line(error)}.") from error


def _quiet() -> None:
    """Serve tells of every step, and Ray of its token mode by a warning on every start (``_ensure_token`` has
    dealt with that)."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)


def _ensure_token() -> None:
    """Token authentication is Ray's default since 2.60 and stays on. Ray would write a new token readable
    by everybody, so a missing one is made here, readable by its owner alone."""
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token" or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / TOKEN_FILE
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        return
    except OSError as error:
        raise StartError(
            f"Ray's token cannot be written to {path} ({error.strerror}); "
            "set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled on a machine that only you use."
        ) from None


def _other_ray() -> str | None:
    """Address of a cluster that ``ray start`` left running here; None when there is none."""
    file = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        address = file.read_text(encoding="utf-8").strip()
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=0.5):
            return address
    except (OSError, ValueError):
        return None


def _check_space() -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise StartError(
            f"Only {free // 2**20} MiB are free in {folder}; Ray needs {MIN_FREE_BYTES // 2**20} MiB there."
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
