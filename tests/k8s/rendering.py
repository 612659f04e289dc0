"""The part of kustomize that k8s/ uses: resources, components, JSON patches, images, namespace, config maps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml"))
KNOWN = {
    "apiVersion", "kind", "namespace", "resources", "components", "patches", "images", "configMapGenerator",
}  # fmt: skip
CLUSTER_WIDE = {"Namespace"}


def render(folder: Path) -> list[Manifest]:
    """What ``kubectl kustomize`` gives for a folder, in no particular order."""
    return _accumulate(folder, [])


def _accumulate(folder: Path, given: list[Manifest]) -> list[Manifest]:
    """``given`` are the manifests that a component works on."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    unknown = set(kustomization) - KNOWN
    assert not unknown, f"{folder}: the renderer does not know {unknown}"
    manifests = list(given)
    for name in kustomization.get("resources", ()):
        path = folder / name
        manifests += render(path) if path.is_dir() else documents(path)
    for name in kustomization.get("components", ()):
        manifests = _accumulate(folder / name, manifests)
    for generator in kustomization.get("configMapGenerator", ()):
        manifests.append(_config_map(folder, generator))
    for patch in kustomization.get("patches", ()):
        _apply(documents(folder / patch["path"])[0], _targets(manifests, patch["target"]))
    for image in kustomization.get("images", ()):
        _rename_images(manifests, image)
    if namespace := kustomization.get("namespace"):
        for manifest in manifests:
            if manifest["kind"] not in CLUSTER_WIDE:
                manifest["metadata"]["namespace"] = namespace
    return manifests


def documents(path: Path) -> list[Any]:
    """All YAML documents of a file, with anchors resolved into copies."""
    loaded = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return [_unshared(document) for document in loaded if document is not None]


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(below) for key, below in value.items()}
    return [_unshared(below) for below in value] if isinstance(value, list) else value


def _config_map(folder: Path, generator: Manifest) -> Manifest:
    assert generator["options"]["disableNameSuffixHash"]
    data = {Path(name).name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}
    metadata = {"name": generator["name"], "labels": dict(generator["options"].get("labels", {}))}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _targets(manifests: list[Manifest], target: dict[str, str]) -> list[Manifest]:
    found = [
        manifest
        for manifest in manifests
        if manifest["kind"] == target["kind"] and manifest["metadata"]["name"] == target["name"]
    ]
    assert found, f"a patch is for {target}, which is not there"
    return found


def _apply(operations: list[Manifest], manifests: list[Manifest]) -> None:
    for manifest in manifests:
        for operation in operations:
            _operate(manifest, operation)


def _operate(manifest: Manifest, operation: Manifest) -> None:
    *way, last = (
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"].strip("/").split("/")
    )
    holder: Any = manifest
    for part in way:
        holder = holder[int(part)] if isinstance(holder, list) else holder[part]
    key: Any = int(last) if isinstance(holder, list) else last
    if operation["op"] != "add":
        assert isinstance(holder, list) or key in holder, f"{operation['path']} is not there"
    if operation["op"] == "remove":
        del holder[key]
    else:
        assert operation["op"] in ("add", "replace")
        assert not (isinstance(holder, list) and operation["op"] == "add"), "adding to lists is not rendered"
        holder[key] = copy.deepcopy(operation["value"])


def _rename_images(value: Any, image: dict[str, str]) -> None:
    if isinstance(value, list):
        for below in value:
            _rename_images(below, image)
    elif isinstance(value, dict):
        for name, below in value.items():
            if name in ("containers", "initContainers"):
                for container in below:
                    _rename_image(container, image)
            else:
                _rename_images(below, image)


def _rename_image(container: Manifest, image: dict[str, str]) -> None:
    name = container["image"].partition(":")[0]
    if name == image["name"]:
        container["image"] = f"{image.get('newName', name)}:{image['newTag']}"


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The manifest of that kind and name."""
    (found,) = (item for item in manifests if item["kind"] == kind and item["metadata"]["name"] == name)
    return found
