"""Ingestion jobs on disk: input, state and ownership, shared by every replica that sees the folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from retrieval.config import IngestionConfig
from retrieval.loaders import Loader, LoadFailure
from retrieval.types import Document, JobStatus, RetrievalError

FINISHED = ("succeeded", "failed", "cancelled")
_JOB, _STATUS, _CANCEL, _LOCK, _INPUT = "job.json", "status.json", "CANCEL", "LOCK", "input"
_ABANDONED_SECONDS = 3600.0
"""A half-written job this old is nobody's any more."""


class JobStore:
    """One folder a job: ``job.json`` (whose, and what), ``status.json`` (replaced atomically) and ``input/``,
    which goes when the job ends."""

    def __init__(self, folder: Path, config: IngestionConfig) -> None:
        self._folder = folder
        self._config = config
        folder.mkdir(parents=True, exist_ok=True)

    def create(self, tenant: str, extra: dict[str, object], write: Callable[[Path], None]) -> JobStatus:
        """A queued job whose input ``write`` puts into the folder that it is given. The job appears whole or
        not at all. Raises ``RetrievalError`` when it can't be stored or too many wait already."""
        if sum(self._has_input(job_id) for job_id in self._folders()) >= self._config.max_queued_jobs:
            raise RetrievalError(
                f"{self._config.max_queued_jobs} ingestion jobs wait already: try again later.", "overloaded"
            )
        status = JobStatus(uuid.uuid4().hex, "queued")
        staging = self._folder / f".{status.id}"
        try:
            (staging / _INPUT).mkdir(parents=True)
            write(staging / _INPUT)
            (staging / _JOB).write_text(
                json.dumps({"tenant": tenant, "created": time.time(), **extra}), encoding="utf-8"
            )
            (staging / _STATUS).write_text(json.dumps(asdict(status)), encoding="utf-8")
            os.replace(staging, self._folder / status.id)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise RetrievalError(
                f"The job could not be stored: {error.strerror}.", "job_not_stored"
            ) from error
        return status

    def tenant(self, job_id: str) -> str | None:
        """Whose job it is; None when there is none of this id."""
        job = self._read(job_id, _JOB)
        return str(job["tenant"]) if job else None

    def status(self, job_id: str) -> JobStatus | None:
        found = self._read(job_id, _STATUS)
        if found is None:
            return None
        return JobStatus(**{**found, "failures": tuple((name, why) for name, why in found["failures"])})

    def save(self, status: JobStatus) -> None:
        """Best effort: a full disk must not end the job whose progress it is."""
        path = self._folder / status.id / _STATUS
        staged = path.with_suffix(".next")
        with contextlib.suppress(OSError):
            staged.write_text(json.dumps(asdict(status), ensure_ascii=True), encoding="utf-8")
            os.replace(staged, path)

    def finish(self, status: JobStatus) -> None:
        """Keep the state, drop the input; of ended jobs the oldest beyond ``max_kept_jobs`` go."""
        self.save(status)
        shutil.rmtree(self._folder / status.id / _INPUT, ignore_errors=True)
        ended = [job_id for job_id in self._ids() if not self._has_input(job_id)]
        for job_id in ended[: max(0, len(ended) - self._config.max_kept_jobs)]:
            shutil.rmtree(self._folder / job_id, ignore_errors=True)

    def request_cancel(self, job_id: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / job_id / _CANCEL).touch()

    def is_cancelled(self, job_id: str) -> bool:
        return (self._folder / job_id / _CANCEL).exists()

    def unfinished(self) -> list[str]:
        """Ids of jobs that have not ended, oldest first."""
        return [job_id for job_id in self._ids() if self._has_input(job_id)]

    @contextlib.contextmanager
    def claimed(self, job_id: str) -> Iterator[bool]:
        """Whether this process may run the job: false while another one does. A killed process's claim ends
        with it."""
        lock = FileLock(self._folder / job_id / _LOCK)
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            yield False
            return
        try:
            yield self._has_input(job_id)
        finally:
            lock.release()

    def items(self, job_id: str) -> Iterator[Document | LoadFailure]:
        """The job's documents, read and parsed one by one."""
        job, folder = self._read(job_id, _JOB) or {}, self._folder / job_id / _INPUT
        if "names" not in job:
            with (folder / "documents.jsonl").open(
                encoding="utf-8", errors="surrogatepass", newline="\n"
            ) as lines:
                yield from (Document(**json.loads(line)) for line in lines if line.strip())
            return
        loader = Loader(self._config, job["domain"], job["tenant"])
        for number, name in enumerate(job["names"]):
            yield from loader.load(name, (folder / f"file-{number}").read_bytes())

    def drop_abandoned(self) -> None:
        """Remove what writers that were killed left half-written."""
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith(".") and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> list[str]:
        """Ids of all jobs, in no order: nothing is read."""
        return [path.name for path in self._folder.iterdir() if not path.name.startswith(".")]

    def _ids(self) -> list[str]:
        """Ids of all jobs, oldest first."""
        created = {
            job_id: float((self._read(job_id, _JOB) or {}).get("created", 0.0)) for job_id in self._folders()
        }
        return sorted(created, key=lambda job_id: created[job_id])

    def _has_input(self, job_id: str) -> bool:
        return (self._folder / job_id / _INPUT).is_dir()

    def _read(self, job_id: str, name: str) -> dict[str, Any] | None:
        """None for a job that there isn't (or never was: ids come from callers)."""
        if not job_id.isalnum():
            return None
        try:
            found = json.loads((self._folder / job_id / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None
