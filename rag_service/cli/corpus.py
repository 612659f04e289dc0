"""Giving a folder of documents to a running service: one subfolder a domain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_service.cli.client import Client
from rag_service.cli.output import EXIT_USAGE, CommandError

SUFFIXES = (".md", ".txt", ".html", ".htm", ".pdf", ".docx", ".jsonl")
POLL_SECONDS = 0.2
JOB_SECONDS = 900.0
FINISHED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Ingested:
    """What became of a folder. ``num_unchanged`` documents were in the index already."""

    num_documents: int
    num_unchanged: int
    failures: tuple[tuple[str, str], ...]


def domain_files(folder: Path) -> dict[str, list[Path]]:
    """The documents of each domain's subfolder. Raises ``CommandError`` when there are none."""
    if not folder.is_dir():
        raise CommandError(f"There is no corpus folder {folder}.", EXIT_USAGE, "no_corpus")
    found: dict[str, list[Path]] = {}
    for domain in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(path for path in domain.rglob("*") if path.suffix.lower() in SUFFIXES)
        if files:
            found[domain.name] = files
    if not found:
        raise CommandError(
            f"{folder} has no subfolder with documents (one a domain).", EXIT_USAGE, "no_corpus"
        )
    return found


def ingest_corpus(client: Client, folder: Path, watch: Callable[[int, int], None]) -> Ingested:
    """Send every domain's files and wait for their jobs; ``watch(done, total)`` in documents.

    What the index holds unchanged is not embedded again.
    """
    by_domain = domain_files(folder)
    total = sum(len(files) for files in by_domain.values())
    done = num_unchanged = num_documents = 0
    failures: list[tuple[str, str]] = []
    for domain, paths in by_domain.items():
        names = [path.relative_to(folder / domain).as_posix() for path in paths]
        parts = [("files", (name, path.read_bytes())) for name, path in zip(names, paths, strict=True)]
        job = client.call("POST", "/v1/documents", files=parts, data={"domain": domain}, accept=(202,))
        base = done
        job = _finished(client, job, lambda now, base=base: watch(base + now, total))  # type: ignore[misc]
        done += len(paths)
        watch(done, total)
        num_documents += int(job.get("num_documents", 0))
        num_unchanged += int(job.get("num_unchanged", 0))
        failures.extend((str(name), str(reason)) for name, reason in _failures(job))
    return Ingested(num_documents, num_unchanged, tuple(failures))


def _finished(client: Client, job: Mapping[str, Any], watch: Callable[[int], None]) -> Mapping[str, Any]:
    ends_at = time.monotonic() + JOB_SECONDS
    while job.get("state", job.get("status")) not in FINISHED:
        if time.monotonic() > ends_at:
            raise CommandError(f"Ingestion job {job.get('id')} did not end in {JOB_SECONDS:.0f} seconds.")
        time.sleep(POLL_SECONDS)
        job = client.call("GET", f"/v1/jobs/{job['id']}")
        watch(int(job.get("num_done", 0)))
    if job.get("error"):
        raise CommandError(f"The corpus could not be ingested: {job['error']}")
    return job


def _failures(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = job.get("failures") or ()
    return [
        (row.get("name", "?"), row.get("reason", "?")) if isinstance(row, Mapping) else (row[0], row[1])
        for row in rows
    ]
