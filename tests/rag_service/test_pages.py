"""Pages, health, reports, and errors for paths that don't exist."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from rag_service.api import pages
from rag_service.auth import KeyStore
from rag_service.config import Settings
from tests.fakes import Fakes
from tests.rag_service.conftest import MODEL, MakeSettings, asking


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "web"
    (folder / "js").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>chat</h1>")
    (folder / "dashboard.html").write_text("<h1>dashboard</h1>")
    (folder / "js" / "chat.js").write_text("let x")
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.setattr(pages, "WEB", folder)
    return folder


async def test_pages_have_security_headers(web: Path, client: httpx.AsyncClient) -> None:
    for path, text in (("/", "chat"), ("/dashboard", "dashboard")):
        page = await client.get(path)
        assert text in page.text
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["content-type"].startswith("text/html")
    script = await client.get("/web/js/chat.js")
    assert script.headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "%2e%2e/secret.txt",
        "..%2fsecret.txt",
        "js",
        "",
        "no.js",
        "%00",
        "js/../../secret.txt",
    ],
)
async def test_nothing_outside_the_package_is_served(web: Path, client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(f"/web/{path}")
    assert response.status_code == 404
    assert "secret\n" not in response.text
    assert response.json()["error"]["code"] == "not_found"


async def test_docs_need_no_other_host(client: httpx.AsyncClient) -> None:
    text = (await client.get("/docs")).text
    assert "https://" not in text
    assert "swagger" in text
    assert (await client.get("/openapi.json")).json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]


async def test_ready_names_what_is_not(client: httpx.AsyncClient, fakes: Fakes) -> None:
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "not_ready": {}})
    fakes.retriever.not_ready = {"index": "cannot be reached"}
    waiting = await client.get("/readyz")
    assert (waiting.status_code, waiting.json()["not_ready"]) == (503, {"index": "cannot be reached"})
    assert (await client.get("/healthz")).json() == {"status": "alive"}


async def test_status(client: httpx.AsyncClient) -> None:
    status = (await client.get("/v1/status")).json()
    assert status == {
        "gateway": {"num_in_flight": 0, "retry_after_seconds": 1.0},
        "generator": {"target": "fake", "draft": "small", "draft_fingerprint": "0123456789"},
    }


async def test_ready_survives_a_check_that_fails(client: httpx.AsyncClient, fakes: Fakes) -> None:
    async def broken() -> dict[str, str]:
        raise RuntimeError("secret")

    fakes.generator.ready = broken  # type: ignore[method-assign]
    waiting = await client.get("/readyz")
    assert waiting.status_code == 503
    assert waiting.json()["not_ready"] == {"generator": "cannot be asked (RuntimeError)"}


async def test_unknown_paths_and_methods_in_openais_shape(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = await client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_models_and_domains(client: httpx.AsyncClient) -> None:
    assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == [MODEL]
    domains = (await client.get("/v1/domains")).json()["data"]
    assert [domain["id"] for domain in domains] == list(Settings().service.domains)
    assert (await client.get("/v1/models/none")).status_code == 404


async def test_acceptance(client: httpx.AsyncClient, fakes: Fakes) -> None:
    query = {"window": "24h", "domain": "legal", "group_by": "draft"}
    assert (await client.get("/v1/acceptance", params=query)).json()["domains"] == {}
    assert fakes.recorder.queries == [query]
    table = await client.get("/v1/acceptance", params={"format": "csv"})
    assert table.headers["content-type"].startswith("text/csv")
    assert table.text.startswith("domain")
    columns = await client.get("/v1/acceptance", params={"format": "parquet"})
    assert columns.content[:4] == b"PAR1"
    for bad in ({"window": "soon"}, {"format": "xml"}, {"colour": "red"}, {"domain": "cooking"}):
        assert (await client.get("/v1/acceptance", params=bad)).status_code == 400


async def test_metrics(make_settings: MakeSettings, fakes: Fakes) -> None:
    async with asking(make_settings(), fakes) as client:
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "rag_requests_total 0" in metrics.text
    closed = make_settings(auth__public_metrics=False)
    KeyStore(closed.keys_file).create()
    async with asking(closed, fakes) as client:
        assert (await client.get("/metrics")).status_code == 401
