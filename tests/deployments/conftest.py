"""One real local Ray for all tests of this folder that ask for it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    # Ray Serve 2.60 declares pydantic fields in a way that pydantic 2.14 calls deprecated, at import.
    warnings.simplefilter("ignore", DeprecationWarning)
    import ray
    import ray.serve

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)
"""Tests write no token into the home folder of whoever runs them."""

from deployments.cluster import check_port, start_ray  # noqa: E402
from rag_service.config import Settings  # noqa: E402


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A private Ray with Serve on a free port."""
    assert start_ray(Settings(), address="local")
    ray.serve.start(http_options={"host": "127.0.0.1", "port": check_port("127.0.0.1", 0)})
    yield
    ray.shutdown()
