"""Jobs on disk, with an ingestion that only counts: replicas that share a folder, bounds, restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import pytest

from retrieval.config import IngestionConfig
from retrieval.ingestion import Ingestion, Progress
from retrieval.jobs import Jobs
from retrieval.loaders import LoadFailure
from retrieval.types import Document, RetrievalError

DOCUMENT = Document("d", "legal", "", "Rent is due in May.")


class Counting:
    """Stands in for the ingestion: counts documents once its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: list[str] = []

    def run(
        self,
        items: Iterable[Document | LoadFailure],
        on_progress: Callable[[Progress], None],
        is_cancelled: Callable[[], bool],
    ) -> Progress:
        progress = Progress()
        for item in items:
            on_progress(progress)
            while not self.gate.wait(0.01):
                if is_cancelled():
                    return progress
            if is_cancelled():
                return progress
            self.seen.append(item.id if isinstance(item, Document) else item.name)
            progress.num_documents += 1
            progress.num_done += 1
        return progress


def jobs(folder: Path, counting: Counting, **bounds: int) -> Jobs:
    return Jobs(folder, IngestionConfig(**bounds), lambda: cast(Ingestion, counting))


def running(some: Jobs, job_id: str) -> bool:
    status = some.get(job_id, "default")
    return status is not None and status.state == "running"


def test_replicas_that_share_a_folder_know_each_others_jobs(tmp_path: Path) -> None:
    here, there = Counting(), Counting()
    first = jobs(tmp_path, here)
    job = first.submit_documents([DOCUMENT], "default")
    while not running(first, job.id):
        pass
    second = jobs(tmp_path, there)  # finds the job unfinished, and leaves it to the one who runs it
    assert second.get(job.id, "default") is not None
    assert second.get(job.id, "globex") is None
    here.gate.set()
    assert second.wait(job.id, 30).state == "succeeded"
    assert (here.seen, there.seen) == (["d"], [])
    first.close()
    second.close()


def test_a_job_is_cancelled_through_another_replica(tmp_path: Path) -> None:
    counting = Counting()
    first, second = jobs(tmp_path, counting), jobs(tmp_path, Counting())
    job = first.submit_documents([DOCUMENT], "default")
    while not running(first, job.id):
        pass
    assert second.cancel(job.id, "globex") is None
    assert second.cancel(job.id, "default") is not None
    assert first.wait(job.id, 30).state == "cancelled"
    assert counting.seen == []
    first.close()
    second.close()


def test_unfinished_jobs_run_at_the_next_start_and_outcomes_stay(tmp_path: Path) -> None:
    counting = Counting()
    before = jobs(tmp_path, counting)
    ids = [before.submit_files([(f"{n}.txt", b"Rent is due.")], "legal", "default").id for n in range(3)]
    before.close()
    counting.gate.set()
    after = jobs(tmp_path, counting)
    assert [after.wait(job_id, 30).state for job_id in ids] == ["succeeded"] * 3
    assert counting.seen == ["0.txt", "1.txt", "2.txt"]
    after.close()
    again = jobs(tmp_path, counting)
    assert again.wait(ids[0], 0).num_done == 1
    again.close()


def test_what_waits_and_what_is_kept_is_bounded(tmp_path: Path) -> None:
    counting = Counting()
    some = jobs(tmp_path, counting, max_queued_jobs=2, max_kept_jobs=1)
    ids = [some.submit_documents([DOCUMENT], "default").id for _ in range(2)]
    with pytest.raises(RetrievalError, match="wait already") as caught:
        some.submit_documents([DOCUMENT], "default")
    assert caught.value.code == "overloaded"
    counting.gate.set()
    assert some.wait(ids[1], 30).state == "succeeded"
    assert some.get(ids[0], "default") is None
    some.close()


def test_an_id_is_no_path(tmp_path: Path) -> None:
    some = jobs(tmp_path / "jobs", Counting())
    (tmp_path / "job.json").write_text('{"tenant": "default"}')
    assert some.get("..", "default") is None
    assert some.get("../jobs", "default") is None
    some.close()
