"""Ingestion jobs: queued on disk, so that they survive a restart, and worked off one after another."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from retrieval.config import IngestionConfig
from retrieval.ingestion import Ingestion, Progress
from retrieval.job_store import FINISHED, JobStore
from retrieval.types import Document, JobCounts, JobStatus, RetrievalError

_SAVE_SECONDS = 0.5
_POLL_SECONDS = 0.2


class Jobs:
    """Takes documents and files, answers at once with a job, and ingests in its one worker thread.

    A job's input lies on disk until the job ends. After a crash the jobs that had not ended run again:
    ingestion is idempotent, so what they had done is skipped. Replicas that share the folder know of each
    other's jobs, and none runs a job that another one is running.
    """

    def __init__(self, folder: Path, config: IngestionConfig, ingestion: Callable[[], Ingestion]) -> None:
        """``ingestion`` is asked for anew by every job: the collection behind it may have been switched."""
        self._store = JobStore(folder, config)
        self._ingestion = ingestion
        self._running: JobStatus | None = None
        self._saved_at = 0.0
        self._ended = JobCounts()
        self._store.drop_abandoned()
        self._queue = self._store.unfinished()
        self._changed = threading.Condition()
        self._closing = False
        self._worker = threading.Thread(target=self._work, name="ingestion", daemon=True)
        self._worker.start()

    def submit_documents(self, documents: Sequence[Document], tenant: str) -> JobStatus:
        """Queue documents, all of them ``tenant``'s. Raises ``RetrievalError`` for another's among them."""
        if any(document.tenant != tenant for document in documents):
            raise RetrievalError("The documents of one job belong to one tenant.", "mixed_tenants")

        def write(folder: Path) -> None:
            with (folder / "documents.jsonl").open("wb") as file:
                for document in documents:
                    line = json.dumps({**asdict(document), "tenant": tenant}, ensure_ascii=False)
                    file.write(line.encode("utf-8", "surrogatepass") + b"\n")

        return self._enqueue(self._store.create(tenant, {}, write))

    def submit_files(self, files: Sequence[tuple[str, bytes]], domain: str | None, tenant: str) -> JobStatus:
        """Queue raw files; they are parsed by the worker."""

        def write(folder: Path) -> None:
            for number, (_, content) in enumerate(files):
                (folder / f"file-{number}").write_bytes(content)

        names = [name for name, _ in files]
        return self._enqueue(self._store.create(tenant, {"domain": domain, "names": names}, write))

    def get(self, job_id: str, tenant: str) -> JobStatus | None:
        """None also for another tenant's job."""
        return self._status(job_id) if self._store.tenant(job_id) == tenant else None

    def cancel(self, job_id: str, tenant: str) -> JobStatus | None:
        """Documents already written stay; the rest is left out."""
        if self._store.tenant(job_id) != tenant:
            return None
        with self._changed:
            status = self._status(job_id)
            if status is not None and status.state not in FINISHED:
                self._store.request_cancel(job_id)
                if job_id in self._queue:
                    self._queue.remove(job_id)
                    self._store.finish(replace(status, state="cancelled"))
                    self._changed.notify_all()
        return self._status(job_id)

    def wait(self, job_id: str, timeout: float | None = None) -> JobStatus:
        """Block until the job has ended (or ``timeout`` seconds have passed)."""
        ends_at = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self._status(job_id)
            if status is None:
                raise RetrievalError(f"There is no job {job_id}.", "not_found")
            if status.state in FINISHED or (ends_at is not None and time.monotonic() >= ends_at):
                return status
            with self._changed:
                self._changed.wait(_POLL_SECONDS)

    def counts(self) -> JobCounts:
        """What waits here, and how the jobs of this process have ended."""
        with self._changed:
            return replace(self._ended, num_waiting=len(self._queue) + (self._running is not None))

    def close(self) -> None:
        """Stop after the document being written; unfinished jobs go on at the next start."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()

    def _enqueue(self, status: JobStatus) -> JobStatus:
        with self._changed:
            self._queue.append(status.id)
            self._changed.notify_all()
        return status

    def _status(self, job_id: str) -> JobStatus | None:
        running = self._running
        return running if running is not None and running.id == job_id else self._store.status(job_id)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._queue))
                if self._closing:
                    return
                job_id = self._queue.pop(0)
            with self._store.claimed(job_id) as is_ours:
                if is_ours:
                    self._run(job_id)

    def _run(self, job_id: str) -> None:
        self._report(replace(self._store.status(job_id) or JobStatus(job_id, "queued"), state="running"))
        try:
            progress = self._ingestion().run(
                self._store.items(job_id),
                lambda progress: self._report(_with_progress(job_id, progress)),
                lambda: self._closing or self._store.is_cancelled(job_id),
            )
        except Exception as error:  # whatever a parser or the index came up with is the job's failure
            status = self._running or JobStatus(job_id, "running")
            self._finish(replace(status, state="failed", error=f"{type(error).__name__}: {error}"))
            return
        cancelled = self._store.is_cancelled(job_id)
        if self._closing and not cancelled:
            return
        self._finish(_ended(_with_progress(job_id, progress), progress, cancelled), progress.num_failed)

    def _report(self, status: JobStatus) -> None:
        """For readers here at once; for other replicas a few times a second."""
        self._running = status
        if time.monotonic() - self._saved_at >= _SAVE_SECONDS:
            self._store.save(status)
            self._saved_at = time.monotonic()

    def _finish(self, status: JobStatus, num_failed_documents: int = 0) -> None:
        ended = self._ended
        with self._changed:
            self._ended = JobCounts(
                num_succeeded=ended.num_succeeded + (status.state == "succeeded"),
                num_failed=ended.num_failed + (status.state == "failed"),
                num_failed_documents=ended.num_failed_documents + num_failed_documents,
            )
            self._store.finish(status)
            self._running = None
            self._changed.notify_all()


def _with_progress(job_id: str, progress: Progress) -> JobStatus:
    return JobStatus(
        id=job_id,
        state="running",
        num_documents=progress.num_documents,
        num_done=progress.num_done,
        num_unchanged=progress.num_unchanged,
        num_chunks=progress.num_chunks,
        failures=tuple(progress.failures),
    )


def _ended(status: JobStatus, progress: Progress, cancelled: bool) -> JobStatus:
    if cancelled:
        return replace(status, state="cancelled")
    if progress.num_failed and not progress.num_done:
        return replace(status, state="failed", error="No document could be ingested; see the failures.")
    return replace(status, state="succeeded")
