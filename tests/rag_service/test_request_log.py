"""The request log: nothing acknowledged is lost, nothing is counted twice, nothing half-written is read."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from generation.types import DrafterCounts, SpeculationStats
from rag_service import log_storage, request_log, write_ahead
from rag_service.record import RequestRecord
from rag_service.request_log import RequestLog
from rag_service.request_row import SCHEMA

NOON = 1_780_000_000.0
DAY = 86_400.0
STATS = SpeculationStats(
    num_rounds=5, num_draft_tokens=12, num_accepted_tokens=7, num_rejections=2,
    tested_per_position=(4, 3, 2), accepted_per_position=(3, 2, 2), acceptance_histogram=(1, 1, 0, 2),
    rounds_by_cause={"rejected": 2, "all_accepted": 2, "no_proposal_miss": 1}, overlap_sum=6.5, num_overlap=9,
    by_drafter={"passages": DrafterCounts(12, 7, 2, 6.5, 9)}, lookahead_hits=3, lookahead_misses=1,
)  # fmt: skip
RECORD = RequestRecord(
    request_id="r1", started_at=NOON, domain="finance", tenant="t", outcome="ok", total_seconds=1.5,
    stage_seconds={"queue": 0.1, "decode": 1.2}, time_to_first_token_seconds=0.3, num_prompt_tokens=200,
    num_generated_tokens=40, stats=STATS, target="smol", draft="d1", mode="lookahead", question="Who?",
    answer="Me.",
)  # fmt: skip


def ids(log: RequestLog, since: float | None = None, until: float | None = None) -> list[str]:
    with log.reading(since, until) as connection:
        return [row[0] for row in connection.execute("select request_id from requests order by 1").fetchall()]


def test_row_reads_back_before_and_after_compaction(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path))
    log.append(RECORD)
    query = (
        "select domain, total_seconds, stage_seconds['decode'], tested_per_position,"
        " rounds_by_cause['rejected'], by_drafter[1].num_accepted_tokens, question, overlap_sum from requests"
    )
    expected = ("finance", 1.5, 1.2, [4, 3, 2], 2, 7, None, 6.5)
    with log.reading() as connection:
        assert connection.execute(query).fetchall() == [expected]
    log.close()
    assert not list((tmp_path / "write-ahead").iterdir())
    with log.reading() as connection:
        assert connection.execute(query).fetchall() == [expected]
        columns = [column[0] for column in connection.execute("describe requests").fetchall()]
    assert columns == SCHEMA.names


def test_text_is_kept_only_when_asked(tmp_path: Path) -> None:
    silent = RequestLog(str(tmp_path / "silent"))
    silent.append(RECORD)
    written = next((tmp_path / "silent" / "write-ahead").iterdir()).read_bytes()
    assert b"Who?" not in written
    assert b"Me." not in written
    wordy = RequestLog(str(tmp_path / "wordy"), keep_text=True)
    wordy.append(replace(RECORD, question="naïve \ud800?"))
    wordy.close()
    with wordy.reading() as connection:
        assert connection.execute("select question, answer from requests").fetchall() == [("naïve ??", "Me.")]


def test_partitions_by_day_and_reads_a_window(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path))
    for day in range(3):
        log.append(replace(RECORD, request_id=f"d{day}", started_at=NOON + day * DAY))
    log.close()
    assert len(list(tmp_path.glob("day=*/part-*.parquet"))) == 3
    log.append(replace(RECORD, request_id="ahead", started_at=NOON + 1.5 * DAY))
    assert ids(log) == ["ahead", "d0", "d1", "d2"]
    assert ids(log, NOON + DAY, NOON + 2 * DAY) == ["ahead", "d1"]
    log.close()


def test_maintain_compacts_by_rows_and_by_age(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path), segment_rows=3, segment_seconds=60)
    log.append(RECORD)
    log.maintain()
    assert not list(tmp_path.glob("day=*/*"))
    log.append(RECORD)
    log.append(RECORD)
    log.maintain()
    assert len(list(tmp_path.glob("day=*/*"))) == 1
    log.append(RECORD)
    log.maintain(now=time.time() + 61)
    assert len(list(tmp_path.glob("day=*/*"))) == 2
    assert len(ids(log)) == 4
    log.close()


def test_row_in_both_places_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between writing Parquet and removing the write-ahead file leaves every row twice."""
    log = RequestLog(str(tmp_path))
    log.append(RECORD)
    log.append(replace(RECORD, request_id="r2", started_at=NOON + DAY))
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    log.close()
    monkeypatch.undo()
    assert len(list(tmp_path.glob("day=*/*.parquet"))) == 2
    assert len(list((tmp_path / "write-ahead").iterdir())) == 1
    assert ids(log) == ["r1", "r2"]
    RequestLog(str(tmp_path)).maintain()
    assert not list((tmp_path / "write-ahead").iterdir())
    assert ids(log) == ["r1", "r2"]


def test_merge_counts_rows_once_even_when_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog(str(tmp_path))
    for number in range(12):
        log.append(replace(RECORD, request_id=f"r{number:02}"))
        log.close()
        storage = log_storage.LogStorage(str(tmp_path))
    everything = [f"r{number:02}" for number in range(12)]
    day = storage.days()[0]
    sources = storage.parts(day)
    if len(sources) < 9:  # ``close`` merges a finished day as soon as it has many files
        assert ids(log) == everything
    monkeypatch.setattr(type(storage.filesystem), "rm_file", lambda self, path: None)
    storage.merge(day, sources)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("day=*/*.parquet"))) > len(storage.files(day))
    assert ids(log) == everything
    storage.remove_replaced(day)
    assert len(list(tmp_path.glob("day=*/*.parquet"))) == len(storage.files(day))
    assert ids(log) == everything


def test_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path))
    log.append(RECORD)
    path = next((tmp_path / "write-ahead").glob("*.jsonl"))
    with path.open("ab") as file:
        file.write(b'{"request_id":"torn","started_at":17')
    assert ids(log) == ["r1"]
    log.close()
    assert ids(log) == ["r1"]


def test_segment_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    writer, other = RequestLog(str(tmp_path)), RequestLog(str(tmp_path))
    writer.append(RECORD)
    other.maintain(now=time.time() + 10_000)
    assert len(list((tmp_path / "write-ahead").glob("*.jsonl"))) == 1
    writer.append(replace(RECORD, request_id="r2"))
    assert ids(other) == ["r1", "r2"]
    writer.close()
    assert ids(other) == ["r1", "r2"]


def test_full_disk_keeps_rows_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog(str(tmp_path), max_pending=5)
    log.append(RECORD)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        real(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for number in range(8):
        log.append(replace(RECORD, request_id=f"w{number}"))
    log.flush()
    assert log.failure is not None
    assert "No space left" in log.failure
    assert (log.num_pending, log.num_dropped) == (5, 3)
    assert ids(log) == ["r1", *(f"w{number}" for number in range(3, 8))]
    monkeypatch.setattr(os, "write", real)
    log.flush()
    assert log.num_pending == 0
    assert not log.failure
    log.close()
    assert ids(log) == ["r1", *(f"w{number}" for number in range(3, 8))]


def test_really_full_file_system_degrades(tmp_path: Path) -> None:
    """A file-size limit makes the kernel itself cut a write short, as a full disk does."""
    script = f"""
import resource, signal
from tests.rag_service.test_request_log import RECORD, RequestLog, ids
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = RequestLog({str(tmp_path)!r})
log.append(RECORD)
resource.setrlimit(resource.RLIMIT_FSIZE, (2500, resource.RLIM_INFINITY))
for number in range(6):
    log.append(RECORD)
assert log.failure is not None and log.num_pending > 0
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.flush()
assert log.failure is None and log.num_pending == 0, (log.failure, log.num_pending)
log.close()
print(len(ids(log)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "7", done.stderr


def test_retention_removes_whole_days(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path), retention_days=2)
    now = NOON + 5 * DAY
    for day in range(6):
        log.append(replace(RECORD, request_id=f"d{day}", started_at=NOON + day * DAY))
    log.flush()
    log.maintain(now=time.time() + 10_000)  # seals; everything is older than two days by then
    log.append(replace(RECORD, request_id="new", started_at=time.time()))
    log.close()
    assert ids(log) == ["new"]
    assert now > NOON


def test_without_folder_the_recent_rows_stay_in_memory() -> None:
    log = RequestLog(None, max_pending=3)
    for number in range(5):
        log.append(replace(RECORD, request_id=f"r{number}"))
    log.flush()
    log.maintain()
    assert ids(log) == ["r2", "r3", "r4"]
    assert (log.num_pending, log.num_dropped) == (0, 0)


def test_object_storage(tmp_path: Path) -> None:
    """An fsspec file system without rename or append; DuckDB reads it through fsspec."""
    log = RequestLog(f"memory://log-{tmp_path.name}", local_folder=tmp_path)
    log.append(RECORD)
    log.close()
    log.append(replace(RECORD, request_id="r2"))
    assert ids(log) == ["r1", "r2"]
    log.close()
    assert ids(log) == ["r1", "r2"]
    with pytest.raises(ValueError, match="needs a local folder"):
        RequestLog("memory://elsewhere")


WRITER = """
import sys, time
from dataclasses import replace
from tests.rag_service.test_request_log import NOON, DAY, RECORD, RequestLog
log = RequestLog(sys.argv[1], segment_rows=7)
number = 0
while True:
    name = f"{sys.argv[2]}-{number:05}"
    log.append(replace(RECORD, request_id=name, started_at=NOON + (number % 3) * DAY))
    sys.stdout.write(name + "\\n")
    sys.stdout.flush()
    number += 1
    if number % 7 == 0:
        log.flush()
        log.maintain()
"""


@pytest.mark.slow
def test_kill_at_many_points_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """``kill -9`` thirty times at random moments of writing, compacting and merging."""
    rng = random.Random(7)
    acknowledged: set[str] = set()
    for run in range(30):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), f"w{run:02}"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        time.sleep(rng.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        acknowledged |= {line.strip() for line in lines if line.endswith("\n")}
        found = ids(RequestLog(str(tmp_path)))
        assert len(found) == len(set(found))
        assert acknowledged <= set(found)
        # What was written and not yet acknowledged may be there too: one row a run at most.
        assert len(found) - len(acknowledged) <= run + 1
    for path in tmp_path.glob("day=*/*.parquet"):
        pq.read_table(path)
    recovered = RequestLog(str(tmp_path))
    recovered.close()
    assert not write_ahead.segments(tmp_path / request_log.WAL_FOLDER)
    assert acknowledged <= set(ids(recovered))


class Killed(BaseException):
    """The process dies here: nothing catches it."""


def run_until(
    folder: Path, fatal: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[str], bool]:
    """Append, compact and merge until step ``fatal`` of the file system; acknowledged rows, and if it died."""
    steps = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == fatal and not after:
                raise Killed
            found = real(*args, **options)
            if steps == fatal:
                raise Killed
            return found

        return call

    acknowledged: set[str] = set()
    log = RequestLog(str(folder), segment_rows=2)
    with monkeypatch.context() as patched:
        for name in ("write", "fsync", "replace", "rename", "unlink", "remove"):
            patched.setattr(os, name, dying(getattr(os, name)))
        try:
            for number in range(4):
                record = replace(RECORD, request_id=f"new{number}", started_at=NOON + (number % 2) * DAY)
                log.append(record)
                acknowledged.add(record.request_id)
                log.flush()
                log.maintain()
            log.close()
        except Killed:
            for link in Path("/proc/self/fd").iterdir():  # closed as by the system, which ends the lock
                if link.exists() and str(folder) in str(link.readlink()):
                    os.close(int(link.name))
            return acknowledged, True
    return acknowledged, False


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_death_at_any_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Die before or after each write, sync, rename and removal of appending, compacting and merging."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and nothing to a process that dies
    old = tmp_path / "old"
    for number in range(9):  # as many files of a finished day as are merged
        log = RequestLog(str(old))
        log.append(replace(RECORD, request_id=f"old{number}"))
        with monkeypatch.context() as patched:
            patched.setattr(log, "_merge_finished_days", lambda storage, now: None)
            log.close()
    died, fatal = True, 0
    while died:
        fatal += 1
        folder = tmp_path / str(fatal)
        shutil.copytree(old, folder)
        acknowledged, died = run_until(folder, fatal, after, monkeypatch)
        acknowledged |= {f"old{number}" for number in range(9)}
        for recovered in (False, True):
            if recovered:
                RequestLog(str(folder)).maintain()
                assert not list((folder / "write-ahead").glob("*.jsonl"))
            found = ids(RequestLog(str(folder)))
            assert len(found) == len(set(found)), fatal
            assert acknowledged <= set(found), fatal
            assert len(found) <= len(acknowledged) + 1, fatal
    assert len(list(folder.glob("day=*/merged-*"))) == 1
    assert fatal > 30
