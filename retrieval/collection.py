"""Which collection stands behind the configured name, and how another takes its place.

A collection is named for what its vectors are made of. Other settings mean another collection: it is filled
from the documents that the old one holds, and the alias is switched once it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from qdrant_client import QdrantClient
from qdrant_client import models as qdrant

from retrieval.config import IndexConfig
from retrieval.index.edge import EdgeIndex
from retrieval.index.record import Index
from retrieval.index.server import ServerIndex, connect
from retrieval.types import Document

_PAGE = 64


class Collections(Protocol):
    """The collections of one place, and the alias."""

    def current(self) -> str | None:
        """The collection behind the alias; None before the first one."""
        ...

    def open(self, name: str, dimension: int | None) -> Index:
        """``dimension`` None: the collection exists already."""
        ...

    def switch(self, name: str) -> None:
        """Put ``name`` behind the alias and drop what stood there before."""
        ...


class EdgeCollections:
    """One folder a collection; the alias is a small file, replaced atomically."""

    def __init__(self, config: IndexConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._alias = folder / f"{config.collection}.current"

    def current(self) -> str | None:
        try:
            name = self._alias.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        return name if (self._folder / name).is_dir() else None

    def open(self, name: str, dimension: int | None) -> Index:
        return EdgeIndex(self._folder / name, dimension, self._config.quantization)

    def switch(self, name: str) -> None:
        old = self.current()
        if old == name:
            return
        staged = self._alias.with_suffix(".next")
        staged.write_text(name, encoding="utf-8")
        os.replace(staged, self._alias)
        if old is not None:
            shutil.rmtree(self._folder / old, ignore_errors=True)


class ServerCollections:
    """Collections and aliases of a Qdrant server."""

    def __init__(self, config: IndexConfig, client: QdrantClient | None = None) -> None:
        self._config = config
        self._client = client or connect(config)

    def current(self) -> str | None:
        for alias in self._client.get_aliases().aliases:
            if alias.alias_name == self._config.collection:
                return str(alias.collection_name)
        return None

    def open(self, name: str, dimension: int | None) -> Index:
        return ServerIndex(self._client, name, dimension, self._config.num_retries)

    def switch(self, name: str) -> None:
        old = self.current()
        if old == name:
            return
        alias = self._config.collection
        actions: list[qdrant.AliasOperations] = []
        if old is not None:
            actions.append(qdrant.DeleteAliasOperation(delete_alias=qdrant.DeleteAlias(alias_name=alias)))
        create = qdrant.CreateAlias(collection_name=name, alias_name=alias)
        actions.append(qdrant.CreateAliasOperation(create_alias=create))
        self._client.update_collection_aliases(actions)
        if old is not None:
            self._client.delete_collection(old)


def open_collections(config: IndexConfig, data_folder: Path) -> Collections:
    """Where the configuration says the index is."""
    if config.url is not None:
        return ServerCollections(config)
    return EdgeCollections(config, config.folder or data_folder / "index")


def stored_documents(index: Index) -> Iterator[Document]:
    """Every tenant's documents, whole, as they were given."""
    offset: str | None = None
    while True:
        page, offset = index.sources(_PAGE, offset)
        for source in page:
            yield Document(**source)
        if offset is None:
            return
