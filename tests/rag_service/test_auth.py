"""API keys: kept as hashes, told apart by scope and tenant, gone at once when revoked."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from rag_service.auth import ANONYMOUS, Gatekeeper, KeyStore, check_exposure, is_loopback
from rag_service.config import ConfigError
from rag_service.errors import ApiError
from tests.rag_service.conftest import MakeSettings


def test_a_key_is_nowhere_kept_and_its_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "below" / "keys.json"
    key, record = KeyStore(path).create("acme", ("chat",), note="n")
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert [r.id for r in KeyStore(path).records()] == [record.id]
    assert [p.name for p in path.parent.iterdir()] == ["keys.json"]


def test_a_running_gateway_sees_new_and_revoked_keys(make_settings: MakeSettings) -> None:
    settings = make_settings()
    gatekeeper = Gatekeeper(settings)
    assert gatekeeper.principal(None, "admin") is ANONYMOUS
    store = KeyStore(settings.keys_file)
    key, record = store.create("acme", ("search",), requests_per_minute=5)
    principal = gatekeeper.principal(f"Bearer {key}", "search")
    assert (principal.tenant, principal.requests_per_minute) == ("acme", 5)
    with pytest.raises(ApiError, match="chat") as refused:
        gatekeeper.principal(f"bearer {key}", "chat")
    assert refused.value.status == 403
    store.create("other")
    assert store.revoke(record.id)
    assert not store.revoke(record.id)
    for header in (None, f"Bearer {key}", "Basic x", "Bearer "):
        with pytest.raises(ApiError) as refused:
            gatekeeper.principal(header)
        assert refused.value.status == 401
        assert refused.value.headers == {"WWW-Authenticate": "Bearer"}


def test_admin_may_all_and_an_expired_key_nothing(make_settings: MakeSettings) -> None:
    settings = make_settings()
    store = KeyStore(settings.keys_file)
    admin, _ = store.create(scopes=("admin",))
    old, _ = store.create(days=-1)
    gatekeeper = Gatekeeper(settings)
    assert gatekeeper.principal(f"Bearer {admin}", "ingest").may("analyst")
    with pytest.raises(ApiError, match="not valid"):
        gatekeeper.principal(f"Bearer {old}")


def test_a_damaged_key_file_closes_the_service(make_settings: MakeSettings) -> None:
    settings = make_settings()
    settings.keys_file.write_text("{not json")
    with pytest.raises(ApiError) as refused:
        Gatekeeper(settings).principal("Bearer x")
    assert refused.value.status == 503
    with pytest.raises(ConfigError, match="cannot be read as API keys"):
        KeyStore(settings.keys_file).create()
    settings.keys_file.write_text(json.dumps({"keys": []}))
    os.utime(settings.keys_file, ns=(1, time.time_ns()))
    assert Gatekeeper(settings).principal(None) is ANONYMOUS


def test_a_public_address_needs_a_key(make_settings: MakeSettings) -> None:
    public = make_settings(service__host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 needs API keys .*`rag-service keys create`"):
        check_exposure(public)
    with pytest.raises(ConfigError):
        check_exposure(make_settings(auth__mode="required"))
    check_exposure(make_settings())
    KeyStore(public.keys_file).create()
    check_exposure(public)
    with pytest.raises(ApiError):
        Gatekeeper(public).principal(None)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "10.0.0.1", "::", "example.org")),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
