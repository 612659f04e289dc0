"""API keys: made once, shown once, kept as hashes, each with a tenant, scopes and limits of its own."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_service.config import ConfigError, Settings
from rag_service.errors import ApiError

logger = logging.getLogger(__name__)
Scope = Literal["chat", "search", "ingest", "analyst", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_PREFIX = "rag-"


class KeyRecord(BaseModel):
    """What is kept of a key. ``sha256`` suffices as a hash: keys are 256 random bits, not chosen words."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    sha256: str
    tenant: str = "default"
    scopes: tuple[Scope, ...] = ("chat", "search")
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    created_at: float = 0.0
    expires_at: float | None = None
    note: str = ""


class KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyRecord, ...] = Field(default=())


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. ``key_id`` None: nobody in particular, on a loopback address without keys."""

    tenant: str
    scopes: frozenset[str]
    key_id: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def may(self, *scopes: str) -> bool:
        """Has the caller one of ``scopes``? ``admin`` has all."""
        return "admin" in self.scopes or any(scope in self.scopes for scope in scopes)


ANONYMOUS = Principal("default", frozenset(SCOPES))


class KeyStore:
    """The key file, read again whenever it changes, so that a revoked key is refused at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._by_hash: dict[str, KeyRecord] = {}

    def records(self) -> list[KeyRecord]:
        """All keys, as the file has them now. Raises ``ConfigError`` for a file that cannot be read."""
        self._refresh()
        return list(self._by_hash.values())

    def find(self, key: str) -> KeyRecord | None:
        """The record of ``key`` unless it is unknown or past its time."""
        self._refresh()
        record = self._by_hash.get(_hash(key))
        return None if record is None or _expired(record) else record

    def create(
        self,
        tenant: str = "default",
        scopes: Iterable[Scope] = ("chat", "search"),
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        days: float | None = None,
        note: str = "",
    ) -> tuple[str, KeyRecord]:
        """A new key, and its record. The key itself is nowhere kept."""
        key = _PREFIX + secrets.token_urlsafe(32)
        now = time.time()
        record = KeyRecord(
            id=secrets.token_hex(4),
            sha256=_hash(key),
            tenant=tenant,
            scopes=tuple(dict.fromkeys(scopes)),
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            created_at=now,
            expires_at=None if days is None else now + days * 86400,
            note=note,
        )
        self._write([*self.records(), record])
        return key, record

    def revoke(self, key_id: str) -> bool:
        """Forget a key; False when there is none of that id."""
        records = self.records()
        left = [record for record in records if record.id != key_id]
        if len(left) == len(records):
            return False
        self._write(left)
        return True

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._by_hash = None, {}
            return
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            try:
                keys = KeyFile.model_validate_json(self._path.read_bytes()).keys
            except (OSError, ValidationError):
                raise ConfigError(f"The key file {self._path} cannot be read as API keys.") from None
            self._by_hash = {record.sha256: record for record in keys}
            self._stamp = stamp

    def _write(self, records: Iterable[KeyRecord]) -> None:
        text = json.dumps({"keys": [record.model_dump(mode="json") for record in records]}, indent=2)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A new file moved over the old one (mode 0600): a reader sees all of either, never half of one.
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".api-keys-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, self._path)
        self._stamp = None


class Gatekeeper:
    """Tells who calls, or refuses."""

    def __init__(self, settings: Settings) -> None:
        self._store = KeyStore(settings.keys_file)
        self._required = settings.auth.mode == "required" or not is_loopback(settings.service.host)

    def principal(self, authorization: str | None, *scopes: str) -> Principal:
        """The caller, who has one of ``scopes`` (none named: any key will do). Raises ``ApiError`` 401, 403."""
        key = _bearer(authorization)
        try:
            if not self._required and not self._store.records():
                return ANONYMOUS
            record = self._store.find(key) if key else None
        except ConfigError as error:  # closed, not open, while nobody can be told apart
            logger.error("%s", error)
            raise ApiError(503, "The service cannot read its API keys.", code="unavailable") from None
        if record is None:
            message = "This API key is not valid." if key else "Give an API key: Authorization: Bearer KEY."
            code = "invalid_api_key" if key else "missing_api_key"
            raise ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
        principal = Principal(
            record.tenant,
            frozenset(record.scopes),
            record.id,
            record.requests_per_minute,
            record.tokens_per_minute,
        )
        if scopes and not principal.may(*scopes):
            message = f"This needs a key with the scope {' or '.join(scopes)}."
            raise ApiError(403, message, code="insufficient_scope")
        return principal


def check_exposure(settings: Settings) -> None:
    """Raise ``ConfigError`` when a public address would be served without any key."""
    if is_loopback(settings.service.host) and settings.auth.mode != "required":
        return
    if not KeyStore(settings.keys_file).records():
        required = settings.auth.mode == "required"
        raise ConfigError(
            f"Serving on {settings.service.host} needs API keys and {settings.keys_file} has none: make one with "
            f"`rag-service keys create`, or {'set auth.mode to auto' if required else 'serve on 127.0.0.1'}."
        )


def is_loopback(host: str) -> bool:
    """Can only this machine reach ``host``?"""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _bearer(authorization: str | None) -> str | None:
    kind, _, key = (authorization or "").partition(" ")
    return key.strip() or None if kind.lower() == "bearer" else None


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _expired(record: KeyRecord) -> bool:
    return record.expires_at is not None and record.expires_at <= time.time()
