"""Starting: the port, the token, and what is said when a replica cannot start."""

from __future__ import annotations

import inspect
import socket
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from deployments import app, cluster
from deployments.app import build_app, compose, deploy, last_error, run
from deployments.cluster import StartError, check_port
from rag_service.config import ConfigError, Settings
from tests.deployments.stand_ins import WordsTarget


def test_a_free_port_is_found_for_zero() -> None:
    port = check_port("127.0.0.1", 0)
    assert 1024 < port < 65536
    assert check_port("127.0.0.1", port) == port


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "starts_own_ray", lambda address: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"Port {port} on 127.0.0.1 is taken"):
            run(Settings.load(None, {"service.port": port}))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartError, match="no address of this machine"):
        check_port("203.0.113.7", 8000)


def test_a_public_address_without_keys_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys"):
        run(Settings.load(None, {"service.host": "0.0.0.0", "data_folder": str(tmp_path)}))


def test_the_token_is_made_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    cluster._ensure_token()
    token = tmp_path / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    before = token.read_text()
    assert len(before) == 64
    cluster._ensure_token()
    assert token.read_text() == before


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_given_by_the_environment_is_enough(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, "x")
    cluster._ensure_token()
    assert not (tmp_path / ".ray").exists()


def test_no_room_for_ray_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MIN_FREE_BYTES", 2**60)
    with pytest.raises(StartError, match="MiB are free"):
        cluster._check_space()


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
            "\x1b[36mray::R.__init__()\x1b[39m (pid=1)\n"
            '  File "x.py", line 3, in f\n    raise ValueError("no")\n'
            "retrieval.types.RetrievalError: The model 'm' is missing.\n",
            "The model 'm' is missing.",
        ),
        ("ValueError: first line\nand its second", "ValueError: first line"),
        ("  File 'x'\nIndentationError: unexpected indent", "IndentationError: unexpected indent"),
        ("nothing of the kind", "nothing of the kind"),
        ("", "no reason is given"),
    ],
)
def test_the_reason_is_the_exceptions_own_sentence(message: str, sentence: str) -> None:
    assert last_error(message) == sentence


@pytest.mark.parametrize(("num_slow", "starts"), [(1, True), (2, False)])
def test_a_ray_that_is_too_slow_is_started_once_more(
    num_slow: int, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def init(**_: object) -> None:
        calls.append("init")
        if calls.count("init") <= num_slow:
            raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    if starts:
        cluster._start_own(1)
    else:
        with pytest.raises(cluster.StartError, match="too busy"):
            cluster._start_own(1)
    assert calls == ["init", "shutdown", "init", *(["shutdown"] if not starts else [])]


def test_a_bad_config_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        build_app({"prompt": {"topk": 3}})


def test_a_serve_configs_arguments_build_the_real_application() -> None:
    application = build_app({"prompt": {"top_k": 2}, "deployments": {"draft": {"num_replicas": 0}}})
    assert isinstance(application, serve.Application)
    assert list(inspect.signature(build_app).parameters) == ["args"]  # Serve takes builders of one parameter


def test_the_application_is_composed_of_named_deployments() -> None:
    settings = Settings()
    target = deploy(settings, "Target", WordsTarget).bind("folder")
    application = compose(settings, target)
    assert isinstance(application, serve.Application)
    assert application._bound_deployment.name == "Gateway"


def test_the_address_to_ask_is_one_that_answers() -> None:
    assert app._url("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert app._url("::", 80) == "http://[::1]:80"
    assert app._url("localhost", 80) == "http://localhost:80"


class BrokenReplica:
    """Cannot start."""

    def __init__(self, folder: str) -> None:
        raise RuntimeError(f"There is no model in {folder}.")


def test_a_replica_that_cannot_start_is_named_with_its_reason(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.load(None, {"service.port": 0, "data_folder": str(tmp_path)})
    broken: Any = deploy(settings, "Target", BrokenReplica).bind("the cache")
    with pytest.raises(
        StartError, match=r"^Target cannot start: RuntimeError: There is no model in the cache\.$"
    ):
        run(settings, application=broken, ready_seconds=300)
    remains = serve.status().applications.get("rag")
    assert remains is None or remains.status == "DELETING"


def test_another_port_than_that_of_the_running_serve_is_refused(local_ray: None, tmp_path: Path) -> None:
    settings = Settings.load(None, {"service.port": check_port("127.0.0.1", 0), "data_folder": str(tmp_path)})
    with pytest.raises(StartError, match="Serve runs on this Ray already, on port"):
        run(settings)
