"""``rag-service keys``: what is made opens the service, what is revoked doesn't, and no key is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rag_service.auth import KeyStore
from rag_service.cli import app


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def _json(*arguments: str) -> dict[str, Any]:
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_create_list_revoke(file: Path) -> None:
    options = ("--file", str(file))
    made = _json(
        "create",
        *options,
        "--tenant",
        "acme",
        "--scope",
        "chat,ingest",
        "--requests-per-minute",
        "9",
        "--days",
        "2",
    )
    record = KeyStore(file).find(made["key"])
    assert record is not None
    assert (record.tenant, record.scopes, record.requests_per_minute) == ("acme", ("chat", "ingest"), 9)
    listed = _json("list", *options)
    assert [key["id"] for key in listed["keys"]] == [made["id"]]
    assert made["key"] not in json.dumps(listed)
    assert "sha256" not in json.dumps(listed)
    assert _json("revoke", made["id"], *options) == {"id": made["id"], "revoked": True}
    assert KeyStore(file).find(made["key"]) is None
    assert _json("list", *options) == {"keys": []}


def test_mistakes_are_one_sentence_and_change_nothing(file: Path) -> None:
    unknown = _run("create", "--file", str(file), "--scope", "root")
    assert unknown.exit_code == 2
    assert "There is no scope 'root'" in unknown.stderr
    assert not file.exists()
    missing = _run("revoke", "nothing", "--file", str(file))
    assert missing.exit_code == 1
    assert "There is no key 'nothing'" in missing.stderr


def test_people_see_the_key_once(file: Path) -> None:
    shown = _run("create", "--file", str(file), "--note", "laptop")
    assert shown.stdout.startswith("rag-")
    table = _run("list", "--file", str(file))
    assert "laptop" in table.stdout
    assert shown.stdout.split()[0] not in table.stdout
