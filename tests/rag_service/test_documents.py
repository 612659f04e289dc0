"""``/v1/documents``, ``/v1/jobs`` and ``/v1/search``."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rag_service.auth import KeyStore
from tests.fakes import Fakes
from tests.rag_service.conftest import MakeSettings, asking

DOCUMENTS = "/v1/documents"


async def test_json_documents_become_a_job_and_are_found(client: httpx.AsyncClient, fakes: Fakes) -> None:
    body = {
        "domain": "finance",
        "documents": [
            {"id": "a/b", "title": "Fees", "text": "The fee is 3.50.", "metadata": {"year": 2025}},
            {"text": "No title here.", "domain": "legal"},
        ],
    }
    response = await client.post(DOCUMENTS, json=body)
    assert response.status_code == 202
    job = response.json()
    assert (job["state"], job["num_documents"]) == ("succeeded", 2)
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (await client.get(response.headers["location"])).json() == job
    assert (await client.delete(f"/v1/jobs/{job['id']}")).json()["state"] == "cancelled"
    found = (await client.post("/v1/search", json={"query": "fee", "domain": "finance"})).json()["data"]
    assert [(f["document_id"], f["start"], f["metadata"]["year"]) for f in found] == [("a/b", 0, 2025)]
    again = [d.id for d in fakes.retriever.by_id.values() if d.text == "No title here."]
    await client.post(DOCUMENTS, json=body)
    assert [d.id for d in fakes.retriever.by_id.values() if d.text == "No title here."] == again


async def test_files_are_uploaded_under_their_own_names(client: httpx.AsyncClient, fakes: Fakes) -> None:
    files = [("files", ("../../etc/notes.txt", b"Some notes.")), ("files", ("C:\\x\\<b>.md", b"# Title"))]
    response = await client.post(DOCUMENTS, data={"domain": "general"}, files=files)
    assert response.status_code == 202
    assert fakes.retriever.files == [("notes.txt", b"Some notes."), ("<b>.md", b"# Title")]


async def test_files_of_one_name_in_two_folders_stay_two(client: httpx.AsyncClient, fakes: Fakes) -> None:
    files = [("files", (name, name.encode())) for name in ("a/notes.txt", "./b\\notes.txt", "notes.txt")]
    response = await client.post(DOCUMENTS, data={"domain": "general"}, files=files)
    assert response.status_code == 202
    assert [name for name, _ in fakes.retriever.files] == ["a/notes.txt", "b/notes.txt", "notes.txt"]


async def test_two_of_one_name_in_one_request_are_refused(client: httpx.AsyncClient, fakes: Fakes) -> None:
    files = [("files", ("notes.txt", b"one")), ("files", ("/tmp/notes.txt", b"two"))]
    by_form = await client.post(DOCUMENTS, data={"domain": "general"}, files=files)
    documents = [{"id": "same", "text": "one"}, {"id": "same", "text": "two"}]
    as_json = await client.post(DOCUMENTS, json={"domain": "general", "documents": documents})
    for response in (by_form, as_json):
        assert (response.status_code, response.json()["error"]["code"]) == (400, "duplicate_name")
        assert "own name" in response.json()["error"]["message"]
    assert fakes.retriever.files == []
    documents = [{"text": "alike"}, {"text": "alike"}]
    assert (
        await client.post(DOCUMENTS, json={"domain": "general", "documents": documents})
    ).status_code == 202


@pytest.mark.parametrize(
    ("request_fields", "status", "param"),
    [
        ({"json": {"documents": []}}, 400, "documents"),
        ({"json": {"documents": [{"text": "x"}]}}, 400, "documents.0.domain"),
        ({"json": {"documents": [{"text": "x"}], "domain": "cooking"}}, 400, "documents.0.domain"),
        ({"json": {"documents": [{"text": "", "domain": "legal"}]}}, 400, "documents.0.text"),
        ({"json": {"documents": [{"text": "x", "titel": "y"}], "domain": "legal"}}, 400, "documents.0.titel"),
        ({"json": {"documents": [{"text": "x", "metadata": {"a": {}}}]}}, 400, "documents.0.metadata"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, None),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
        ({"data": {"domain": "legal"}, "files": {"other": b"x"}}, 400, "other"),
        ({"data": {"domain": "legal", "files": "text"}, "files": {"file": b"x"}}, 400, "files"),
        ({"data": {}, "files": {"files": b"x"}}, 400, "domain"),
    ],
)
async def test_bad_uploads(
    client: httpx.AsyncClient, fakes: Fakes, request_fields: dict[str, Any], status: int, param: str | None
) -> None:
    before = dict(fakes.retriever.by_id)
    response = await client.post(DOCUMENTS, **request_fields)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert fakes.retriever.by_id == before


async def test_too_large_uploads_are_refused_while_they_come(
    make_settings: MakeSettings, fakes: Fakes
) -> None:
    async with asking(make_settings(service__max_upload_bytes=2048), fakes) as client:

        async def endless() -> Any:
            for _ in range(100):
                yield b"x" * 1000

        kind = {"content-type": "application/json"}
        assert (await client.post(DOCUMENTS, content=endless(), headers=kind)).status_code == 413
        assert (await client.post(DOCUMENTS, content=b"x" * 5000, headers=kind)).status_code == 413


async def test_pages_of_documents(client: httpx.AsyncClient, fakes: Fakes) -> None:
    first = (await client.get(DOCUMENTS, params={"limit": 1})).json()
    assert [d["id"] for d in first["data"]] == ["lease"]
    second = (await client.get(DOCUMENTS, params={"limit": 1, "after": first["next"]})).json()
    assert ([d["id"] for d in second["data"]], second["next"]) == (["library"], None)
    legal = (await client.get(DOCUMENTS, params={"domain": "legal"})).json()["data"]
    assert [d["title"] for d in legal] == ["Lease"]
    assert (await client.get(DOCUMENTS, params={"domain": "cooking"})).status_code == 400
    assert (await client.get(DOCUMENTS, params={"limit": 0})).status_code == 400


async def test_one_document(client: httpx.AsyncClient, fakes: Fakes) -> None:
    document = (await client.get(f"{DOCUMENTS}/library")).json()
    assert document["chunks"][0]["text"].startswith("The library opens")
    assert (await client.delete(f"{DOCUMENTS}/library")).json()["deleted"] is True
    for method in ("GET", "DELETE"):
        gone = await client.request(method, f"{DOCUMENTS}/library")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "document_not_found")
    assert (await client.get("/v1/jobs/none")).json()["error"]["code"] == "job_not_found"


async def test_an_id_with_a_slash(client: httpx.AsyncClient) -> None:
    body = {"domain": "general", "documents": [{"id": "a/b c", "text": "Hello there."}]}
    await client.post(DOCUMENTS, json=body)
    assert (await client.get(f"{DOCUMENTS}/a%2Fb%20c")).json()["id"] == "a/b c"


async def test_tenants_do_not_see_each_other(make_settings: MakeSettings, fakes: Fakes) -> None:
    settings = make_settings()
    store = KeyStore(settings.keys_file)
    mine, _ = store.create("mine", ("ingest", "search"))
    theirs, _ = store.create("theirs", ("ingest", "search"))
    body = {"domain": "general", "documents": [{"id": "secret", "text": "Our secret."}]}
    async with asking(settings, fakes, Authorization=f"Bearer {mine}") as client:
        job = (await client.post(DOCUMENTS, json=body)).json()
        assert (await client.get(f"{DOCUMENTS}/secret")).status_code == 200
    async with asking(settings, fakes, Authorization=f"Bearer {theirs}") as client:
        for method, path in (("GET", "/v1/documents/secret"), ("DELETE", "/v1/documents/secret")):
            assert (await client.request(method, path)).status_code == 404
        assert (await client.get(f"/v1/jobs/{job['id']}")).status_code == 404
        assert (await client.post("/v1/search", json={"query": "secret"})).json()["data"] == []
        assert (await client.get(DOCUMENTS)).json()["data"] == []


async def test_search(client: httpx.AsyncClient, fakes: Fakes) -> None:
    response = await client.post(
        "/v1/search", json={"query": "books for members", "top_k": 1, "filters": {"y": [1]}}
    )
    (found,) = response.json()["data"]
    assert (found["document_id"], found["score"]) == ("library", 2.0)
    assert response.json()["timings"]["embed_seconds"] == 0.001
    assert "rerank;dur=" in response.headers["server-timing"]
    assert fakes.retriever.searches[0].filters == {"y": [1]}
    for body in ({"query": " "}, {"query": ""}, {}, {"query": "x", "domain": "no"}, {"query": "x", "k": 1}):
        assert (await client.post("/v1/search", json=body)).status_code == 400
