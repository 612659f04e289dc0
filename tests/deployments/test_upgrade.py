"""A new draft is rolled out on real Ray while users ask: nothing fails, and both drafts stand in the report."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.schema import LoggingConfig

from deployments.app import RunningService, compose, run
from deployments.options import APPLICATION, logging_options
from rag_service.config import Settings, cache_folder

MODEL = "smollm2-135m-instruct"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say something about libraries."}],
    "rag": {"enabled": False},
    "max_tokens": 16,
    "temperature": 0,
}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (cache_folder() / "models" / MODEL).exists(),
        reason="the packaged model is not in the cache (rag-service models fetch)",
    ),
]


def settings_with(draft: Path, data: Path) -> Settings:
    return Settings.load(
        None,
        {
            "service.port": 0,
            "data_folder": str(data),
            "draft.draft": {"model": str(draft)},
            "draft.force": "yes",
            "engine.speculation.mode": "synchronous",
            "engine.speculation.passages": False,
        },
    )


class Users:
    """Two who ask without a pause."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[int, str]] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=150, trust_env=False) as client:
            while not self._over.is_set():
                reply = client.post("/v1/chat/completions", json=BODY)
                good = reply.status_code == 200
                text = reply.json()["choices"][0]["message"]["content"] if good else reply.text
                self.answers.append((reply.status_code, text))


@pytest.fixture
def drafts(tmp_path: Path) -> tuple[Path, Path]:
    """One model under two names: what is tested is the roll-out, and α is known to be high for both."""
    source = (cache_folder() / "models" / MODEL).resolve()
    for name in ("old-draft", "new-draft"):
        shutil.copytree(source, tmp_path / name)
    return tmp_path / "old-draft", tmp_path / "new-draft"


@pytest.fixture
def service(local_ray: None, drafts: tuple[Path, Path], tmp_path: Path) -> Iterator[RunningService]:
    with run(settings_with(drafts[0], tmp_path / "data"), ready_seconds=400) as running:
        yield running


def deploy(settings: Settings) -> None:
    """As ``serve deploy`` does with a changed config: in place, and returning once everything runs."""
    log = LoggingConfig(**logging_options())
    serve.run_many([serve.RunTarget(compose(settings), APPLICATION, "/", log, True)])


def wait_for_draft(client: httpx.Client, name: str) -> None:
    ends_at = time.monotonic() + 240
    while name not in str(client.get("/v1/status").json()["generator"]["draft"]):
        assert time.monotonic() < ends_at, f"{name} does not serve"
        time.sleep(0.5)


def test_a_draft_is_replaced_and_put_back_without_a_lost_request(
    service: RunningService, drafts: tuple[Path, Path], tmp_path: Path
) -> None:
    with httpx.Client(base_url=service.url, timeout=150, trust_env=False) as client:
        users = Users(service.url)
        try:
            for draft in (drafts[1], drafts[0]):
                deploy(settings_with(draft, tmp_path / "data"))
                wait_for_draft(client, draft.name)
                num_before = len(users.answers)
                while len(users.answers) < num_before + 4:
                    time.sleep(0.2)
        finally:
            users.close()
        assert {status for status, _ in users.answers} == {200}, users.answers
        assert len({text for _, text in users.answers}) == 1
        ends_at = time.monotonic() + 60
        while True:
            report = client.get("/v1/acceptance", params={"group_by": "draft"}).json()
            found = {name for name in drafts if name.name in str(report)}
            if len(found) == 2:
                break
            assert time.monotonic() < ends_at, report
            time.sleep(1.0)
