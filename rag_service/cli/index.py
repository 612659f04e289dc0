"""The index as commands use it: the configured one, or a temporary one over named documents."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rag_service.cli.output import EXIT_USAGE, CommandError, progress

if TYPE_CHECKING:
    from rag_service.config import Settings
    from retrieval.config import RetrievalConfig
    from retrieval.service import RetrievalService


def load_settings(config: Path | None) -> Settings:
    """The settings of a configuration file and the environment."""
    from rag_service.config import Settings

    return Settings.load(config)


@contextmanager
def opened(
    settings: Settings, data_folder: Path | None = None, retrieval: RetrievalConfig | None = None
) -> Iterator[RetrievalService]:
    """Retrieval as configured (or as ``retrieval`` says), closed at the end."""
    from retrieval.service import RetrievalService

    service = RetrievalService(
        retrieval or settings.retrieval, settings.cache_folder, data_folder or settings.data_folder
    )
    try:
        service.wait_until_rebuilt()
        yield service
    finally:
        service.close()


@contextmanager
def indexed(
    settings: Settings, files: Sequence[Path] | None, retrieval: RetrievalConfig | None = None
) -> Iterator[RetrievalService]:
    """Retrieval over the files' documents in a temporary index; over the configured index without files."""
    from retrieval.loaders import Loader

    if not files:
        with opened(settings, retrieval=retrieval) as service:
            yield service
        return
    chosen = _embedded(retrieval or settings.retrieval)
    with (
        tempfile.TemporaryDirectory(prefix="rag-service-") as folder,
        opened(settings, Path(folder), chosen) as service,
    ):
        loader = Loader(settings.retrieval.ingestion, None)
        with progress() as bar:
            task = bar.add_task("indexing", total=None)
            done = service.ingestion.run(
                loader.load_paths([(path, f"{path.parent.name}/{path.name}") for path in files]),
                lambda now: bar.update(task, completed=now.num_documents),
            )
        if done.num_failed:
            name, reason = done.failures[0]
            raise CommandError(f"{name}: {reason}", EXIT_USAGE, "bad_documents")
        yield service


def _embedded(retrieval: RetrievalConfig) -> RetrievalConfig:
    """The same, but never on the configured server or folder: a measurement leaves no trace."""
    index = retrieval.index.model_copy(update={"url": None, "folder": None})
    return retrieval.model_copy(update={"index": index})
