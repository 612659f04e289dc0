"""Ingestion jobs: queued on disk, so that they survive a restart, and worked off one after another."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from retrieval.config import IngestionConfig
from retrieval.ingestion import Ingestion, Progress
from retrieval.loaders import Loader, LoadFailure
from retrieval.types import Document, JobStatus, RetrievalError

_FINISHED = ("succeeded", "failed", "cancelled")


class Jobs:
    """Takes documents and files, answers at once with a job, and ingests in its one worker thread.

    A job's input lies in ``folder/<id>/`` until the job ends. After a crash the jobs that had not ended run
    again: ingestion is idempotent, so what they had done is skipped.
    """

    def __init__(self, folder: Path, config: IngestionConfig, ingestion: Callable[[], Ingestion]) -> None:
        """``ingestion`` is asked for anew by every job: the collection behind it may have been switched."""
        self._folder = folder
        self._config = config
        self._ingestion = ingestion
        self._status: dict[str, JobStatus] = {}
        self._tenants: dict[str, str] = {}
        self._cancelled: set[str] = set()
        self._queue: list[str] = []
        self._changed = threading.Condition()
        self._closing = False
        folder.mkdir(parents=True, exist_ok=True)
        self._restore()
        self._worker = threading.Thread(target=self._work, name="ingestion", daemon=True)
        self._worker.start()

    def submit_documents(self, documents: Sequence[Document], tenant: str) -> JobStatus:
        """Queue documents, all of them ``tenant``'s. Raises ``RetrievalError`` for another's among them."""
        if any(document.tenant != tenant for document in documents):
            raise RetrievalError("The documents of one job belong to one tenant.", "mixed_tenants")
        lines = [
            json.dumps({**asdict(document), "tenant": tenant}, ensure_ascii=False) for document in documents
        ]
        return self._submit(
            tenant, {"documents.jsonl": "\n".join(lines).encode("utf-8", "surrogatepass")}, {}
        )

    def submit_files(self, files: Sequence[tuple[str, bytes]], domain: str | None, tenant: str) -> JobStatus:
        """Queue raw files; they are parsed by the worker."""
        stored = {f"file-{number}": content for number, (_, content) in enumerate(files)}
        return self._submit(tenant, stored, {"domain": domain, "names": [name for name, _ in files]})

    def get(self, job_id: str, tenant: str) -> JobStatus | None:
        """None also for another tenant's job."""
        with self._changed:
            return self._status.get(job_id) if self._tenants.get(job_id) == tenant else None

    def cancel(self, job_id: str, tenant: str) -> JobStatus | None:
        """Documents already written stay; the rest is left out."""
        with self._changed:
            if self._tenants.get(job_id) != tenant:
                return None
            status = self._status[job_id]
            if status.state not in _FINISHED:
                self._cancelled.add(job_id)
                if status.state == "queued":
                    self._queue.remove(job_id)
                    self._finish(job_id, replace(status, state="cancelled"))
            return self._status[job_id]

    def wait(self, job_id: str, timeout: float | None = None) -> JobStatus:
        """Block until the job has ended (or ``timeout`` seconds have passed)."""
        with self._changed:
            self._changed.wait_for(lambda: self._status[job_id].state in _FINISHED, timeout)
            return self._status[job_id]

    def close(self) -> None:
        """Stop after the document being written; unfinished jobs go on at the next start."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()

    def _submit(self, tenant: str, contents: dict[str, bytes], extra: dict[str, object]) -> JobStatus:
        job_id = uuid.uuid4().hex
        staging = self._folder / f".{job_id}"
        try:
            staging.mkdir()
            for name, content in contents.items():
                (staging / name).write_bytes(content)
            (staging / "job.json").write_text(json.dumps({"tenant": tenant, **extra}), encoding="utf-8")
            os.replace(staging, self._folder / job_id)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise RetrievalError(
                f"The job could not be stored: {error.strerror}.", "job_not_stored"
            ) from error
        with self._changed:
            self._enqueue(job_id, tenant)
            return self._status[job_id]

    def _enqueue(self, job_id: str, tenant: str) -> None:
        self._status[job_id] = JobStatus(job_id, "queued")
        self._tenants[job_id] = tenant
        self._queue.append(job_id)
        finished = [job for job, status in self._status.items() if status.state in _FINISHED]
        for job in finished[: max(0, len(self._status) - self._config.max_kept_jobs)]:
            del self._status[job], self._tenants[job]
        self._changed.notify_all()

    def _restore(self) -> None:
        for path in sorted(self._folder.iterdir(), key=lambda entry: entry.stat().st_mtime):
            try:
                tenant = json.loads((path / "job.json").read_text(encoding="utf-8"))["tenant"]
            except (OSError, ValueError, KeyError):
                shutil.rmtree(path, ignore_errors=True)
                continue
            if path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with self._changed:
                    self._enqueue(path.name, str(tenant))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or bool(self._queue))
                if self._closing:
                    return
                job_id = self._queue.pop(0)
                self._status[job_id] = replace(self._status[job_id], state="running")
            try:
                progress = self._ingestion().run(
                    self._items(job_id),
                    lambda progress, job_id=job_id: self._report(job_id, progress),  # type: ignore[misc]
                    lambda job_id=job_id: self._closing or job_id in self._cancelled,  # type: ignore[misc]
                )
            except Exception as error:  # whatever a parser or the index came up with is the job's failure
                with self._changed:
                    failed = replace(
                        self._status[job_id], state="failed", error=f"{type(error).__name__}: {error}"
                    )
                    self._finish(job_id, failed)
                continue
            if self._closing and job_id not in self._cancelled:
                return
            self._report(job_id, progress)
            with self._changed:
                self._finish(job_id, self._ended(job_id, progress))

    def _ended(self, job_id: str, progress: Progress) -> JobStatus:
        status = self._status[job_id]
        if job_id in self._cancelled:
            return replace(status, state="cancelled")
        if progress.num_failed and not progress.num_done:
            return replace(status, state="failed", error="No document could be ingested; see the failures.")
        return replace(status, state="succeeded")

    def _report(self, job_id: str, progress: Progress) -> None:
        with self._changed:
            self._status[job_id] = replace(
                self._status[job_id],
                num_documents=progress.num_documents,
                num_done=progress.num_done,
                num_unchanged=progress.num_unchanged,
                num_chunks=progress.num_chunks,
                failures=tuple(progress.failures),
            )

    def _finish(self, job_id: str, status: JobStatus) -> None:
        self._status[job_id] = status
        self._cancelled.discard(job_id)
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder / job_id)
        self._changed.notify_all()

    def _items(self, job_id: str) -> Iterator[Document | LoadFailure]:
        folder = self._folder / job_id
        job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        if "names" not in job:
            with (folder / "documents.jsonl").open(
                encoding="utf-8", errors="surrogatepass", newline="\n"
            ) as lines:
                for line in lines:
                    if line.strip():
                        yield Document(**json.loads(line))
            return
        loader = Loader(self._config, job["domain"], job["tenant"])
        for number, name in enumerate(job["names"]):
            yield from loader.load(name, (folder / f"file-{number}").read_bytes())
