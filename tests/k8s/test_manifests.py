"""Overlays: valid by every schema there is, restricted, placed where they belong, and adding up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.options import DEPLOYMENT_NAMES
from k8s.tools import serve_config
from rag_service.serve_config import load_settings
from tests.k8s.rendering import K8S, OVERLAYS, ROOT, Manifest, documents, one, render

FOLDERS = [*(f"overlays/{name}" for name in OVERLAYS), "models", "monitoring"]
SCHEMA = Path(os.environ.get("RAG_SHARED", ROOT.parent / "shared")) / "schemas" / "rayservice-v1.openapi.json"
SECRETS = {"rag-service-qdrant", "rag-service-redis", "rag-service-api-keys", "rag-service-hub"}


def rayservice(overlay: str) -> Manifest:
    return one(render(K8S / "overlays" / overlay), "RayService", "rag-service")


def cluster(overlay: str) -> Manifest:
    found: Manifest = rayservice(overlay)["spec"]["rayClusterConfig"]
    return found


def groups(overlay: str) -> dict[str, Manifest]:
    return {group["groupName"]: group for group in cluster(overlay)["workerGroupSpecs"]}


def serve(overlay: str) -> Manifest:
    found: Manifest = yaml.safe_load(rayservice(overlay)["spec"]["serveConfigV2"])
    return found


def pod_specs(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for manifest in manifests:
        if manifest["kind"] == "RayService":
            config = manifest["spec"]["rayClusterConfig"]
            yield "head", config["headGroupSpec"]["template"]["spec"]
            for group in config["workerGroupSpecs"]:
                yield group["groupName"], group["template"]["spec"]
        elif manifest["kind"] in ("StatefulSet", "Job", "Deployment"):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def number(quantity: Any) -> float:
    """A Kubernetes quantity: of processors, or of bytes in powers of two."""
    text = str(quantity)
    for suffix, factor in (("m", 1e-3), ("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30)):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_core_kind_is_valid_by_its_schema(folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importlib.resources, in the validator
        kubernetes_validate = pytest.importorskip(
            "kubernetes_validate", reason="kubernetes-validate is not installed"
        )
        checked = 0
        for manifest in render(K8S / folder):
            if manifest["apiVersion"].split("/")[0] in ("ray.io", "monitoring.coreos.com"):
                continue
            kubernetes_validate.validate(manifest, "1.32", strict=True)
            checked += 1
    assert checked


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_renderer_agrees_with_kustomize(folder: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which carries kustomize, is not installed")
    command = ["kubectl", "kustomize", str(K8S / folder)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def named(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(item["kind"], item["metadata"]["name"]): item for item in manifests}

    assert named(list(yaml.safe_load_all(text))) == named(render(K8S / folder))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rayservice_is_valid_by_kuberays_schema(overlay: str) -> None:
    if not SCHEMA.exists():
        pytest.skip(f"{SCHEMA.name} is not in ../shared/schemas")
    schema = closed(json.loads(SCHEMA.read_text(encoding="utf-8")))
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(schema).validate(rayservice(overlay))


def closed(schema: Any) -> Any:
    """The schema with unknown names refused: the API server would drop them without a word."""
    if isinstance(schema, list):
        return [closed(below) for below in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(below) for name, below in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        result["additionalProperties"] = False
    return result


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_accepts_the_serve_config(overlay: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(serve(overlay))
    (application,) = config.applications
    assert application.import_path == "deployments.app:build_app"
    assert {item.name for item in application.deployments} <= set(DEPLOYMENT_NAMES)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_patch_holds_what_the_settings_say(overlay: str) -> None:
    folder = K8S / "overlays" / overlay
    ((operation,),) = documents(folder / serve_config.PATCH)
    committed, built = yaml.safe_load(operation["value"]), yaml.safe_load(serve_config.build(folder))
    settings = load_settings(folder / "settings.yaml")
    if settings.draft.draft is None:
        # Whether there is a Draft depends on a packaged draft being there, not on the settings.
        for config in (committed, built):
            (application,) = config["applications"]
            application["deployments"] = [
                item for item in application["deployments"] if item["name"] != "Draft"
            ]
    assert committed == built, "run: python k8s/tools/serve_config.py"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_settings_can_be_read_back_from_the_serve_config(overlay: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(serve(overlay)), encoding="utf-8")
    told, written = load_settings(path), load_settings(K8S / "overlays" / overlay / "settings.yaml")
    assert told.engine == written.engine
    assert told.auth == written.auth
    assert told.auth.mode == "required"
    assert told.deployments.target == written.deployments.target


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_are_restricted(folder: str) -> None:
    for name, spec in pod_specs(render(K8S / folder)):
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0, name
        assert security["seccompProfile"]["type"] == "RuntimeDefault", name
        if name != "head":  # the autoscaler beside it talks to the API server
            assert spec["automountServiceAccountToken"] is False, name
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"]["drop"] == ["ALL"], name
            resources = container["resources"]
            assert resources["requests"]["memory"] == resources["limits"]["memory"], name
            claims = {"storage"}  # of a StatefulSet's template
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes) | claims, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_stands_in_the_manifests(overlay: str) -> None:
    manifests = render(K8S / "overlays" / overlay)
    assert not [item for item in manifests if item["kind"] == "Secret"]
    text = yaml.safe_dump(manifests)
    named = set(re.findall(r"secretKeyRef:\n\s+key: \S+\n\s+name: (\S+)", text))
    assert named <= SECRETS
    assert {"rag-service-qdrant", "rag-service-redis"} <= named
    arguments = serve(overlay)["applications"][0]["args"]
    assert "api_key" not in json.dumps(arguments)
    assert "storage" not in arguments.get("limits", {})


def replicas(options: Manifest) -> tuple[int, int]:
    """The fewest and the most of a deployment."""
    scaling = options.get("autoscaling_config")
    if scaling:
        return scaling["min_replicas"], scaling["max_replicas"]
    return options["num_replicas"], options["num_replicas"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_deployment_lands_in_one_group_and_fits_it(overlay: str) -> None:
    found = groups(overlay)
    for number_of in (0, 1):  # the fewest replicas in the fewest pods, the most in the most
        asked: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        for options in serve(overlay)["applications"][0]["deployments"]:
            actor = options["ray_actor_options"]
            (custom,) = actor["resources"]
            (group,) = (name for name, item in found.items() if custom in item["resources"])
            times = replicas(options)[number_of]
            asked[group] += [(actor["num_cpus"], actor.get("num_gpus", 0.0))] * times
        for name, workers in found.items():
            pods = workers["minReplicas" if number_of == 0 else "maxReplicas"]
            cpus = pods * number(workers["resources"]["CPU"])
            gpus = pods * number(workers["resources"].get("GPU", 0))
            assert sum(cpu for cpu, _ in asked[name]) <= cpus, (overlay, name)
            assert sum(gpu for _, gpu in asked[name]) <= gpus, (overlay, name)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rays_resources_are_those_of_the_container(overlay: str) -> None:
    head = cluster(overlay)["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert number(head["resources"]["CPU"]) == 0
    for name, group in groups(overlay).items():
        (container,) = group["template"]["spec"]["containers"]
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert number(group["resources"]["CPU"]) == number(requests["cpu"]), name
        assert number(group["resources"].get("GPU", 0)) == number(requests.get("nvidia.com/gpu", 0)), name
        assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu"), name
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"], name
        if "GPU" in group["resources"]:
            spec = group["template"]["spec"]
            assert spec["nodeSelector"]["rag-service/gpu"] == name
            assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
            assert "nvidia-smi" in json.dumps(container["livenessProbe"])
            assert container["image"].endswith("-cuda")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_end_after_their_requests(overlay: str) -> None:
    settings = load_settings(K8S / "overlays" / overlay / "settings.yaml")
    drain = max(
        item["graceful_shutdown_timeout_s"] for item in serve(overlay)["applications"][0]["deployments"]
    )
    for name, group in groups(overlay).items():
        seconds = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert seconds >= drain >= settings.service.request_deadline_seconds, name


def test_network_policies_deny_by_default_and_name_pods_that_exist() -> None:
    manifests = render(K8S / "overlays" / "gpu-ha")
    policies = {item["metadata"]["name"]: item for item in manifests if item["kind"] == "NetworkPolicy"}
    assert policies["default-deny"]["spec"]["podSelector"] == {}
    assert policies["default-deny"]["spec"].keys() & {"ingress", "egress"} == set()
    apps = {
        item["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        for item in manifests
        if item["kind"] == "StatefulSet"
    }
    named = set(re.findall(r"app.kubernetes.io/name: (\S+)", yaml.safe_dump(list(policies.values()))))
    assert named <= apps


def test_a_budget_leaves_a_pod_to_evict() -> None:
    manifests = render(K8S / "overlays" / "gpu-ha")
    found = groups("gpu-ha")
    for budget in (item for item in manifests if item["kind"] == "PodDisruptionBudget"):
        group = budget["spec"]["selector"]["matchLabels"].get("ray.io/group")
        if group:
            assert budget["spec"]["minAvailable"] < found[group]["minReplicas"]


def test_the_version_is_the_projects() -> None:
    import ray

    import rag_service

    assert cluster("gpu-ha")["rayVersion"] == ray.__version__
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"', project, re.MULTILINE)
    assert version is not None
    image = cluster("local-cpu")["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"rag-service:{version[1]}"
    assert rag_service.__file__


def test_models_fetched_are_models_served() -> None:
    (container,) = one(render(K8S / "models"), "Job", "fetch-models")["spec"]["template"]["spec"][
        "containers"
    ]
    fetched = next(item["value"] for item in container["env"] if item["name"] == "MODELS").split()
    for overlay in ("gpu-single", "gpu-ha"):
        settings = load_settings(K8S / "overlays" / overlay / "settings.yaml")
        assert settings.draft.draft is not None
        assert {settings.engine.target.model, settings.draft.draft.model} <= set(fetched)


def test_the_dockerfile_copies_what_exists_and_runs_as_nobody_special() -> None:
    text = (K8S / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
    assert re.search(r"^USER 1000", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    assert {"build", "base-cpu", "base-cuda", "service"} <= stages
