"""What every replica does first: its log lines go where Serve's go, and it traces as the settings say."""

from __future__ import annotations

import logging

from ray import serve
from ray.serve.exceptions import RayServeException

from rag_service.config import Settings
from rag_service.tracing import start_tracing

OWN_PACKAGES = ("deployments", "rag_service", "generation", "retrieval")


def observe(settings: Settings) -> None:
    """To be called by a replica's constructor; outside Serve (a test, a benchmark) only traces are begun."""
    try:
        name = serve.get_replica_context().deployment
    except RayServeException:
        start_tracing(settings.telemetry, "none")
        return
    start_tracing(settings.telemetry, name)
    # As children of Serve's logger ours share its JSON file, with request id and replica in each line. Left to
    # themselves warnings went as bare text to the worker's standard error.
    served = logging.getLogger("ray.serve")
    for package in OWN_PACKAGES:
        logging.getLogger(package).parent = served
