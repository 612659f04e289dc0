"""Alerts and dashboards: valid PromQL over metrics that exist, tested, and each with its entry in the runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from k8s.tools import dashboards
from rag_service.telemetry import Telemetry
from tests.k8s.rendering import K8S, ROOT, documents

RUNBOOK = ROOT / "docs" / "operations.md"
UNIT_TESTS = Path(__file__).with_name("alerts.test.yaml")
KUBELET = {"kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"}
METRIC = re.compile(r"(?<![\w:/$\"])((?:rag|ray|kubelet)[_:][a-z0-9_:]+)(?![\w]*\")")


def rule_groups() -> list[dict[str, Any]]:
    (document,) = documents(K8S / "monitoring" / "alerts.yaml")
    groups: list[dict[str, Any]] = document["spec"]["groups"]
    return groups


def rules() -> list[dict[str, Any]]:
    return [rule for group in rule_groups() for rule in group["rules"]]


def panels() -> Iterator[tuple[str, str]]:
    """Title and PromQL of every query of every dashboard."""
    for name in dashboards.DASHBOARDS:
        content = json.loads((dashboards.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        for panel in content["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]


def expressions() -> list[tuple[str, str]]:
    return [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()] + list(panels())


def service_metrics() -> set[str]:
    """Every series name that ``/metrics`` may show, from the telemetry module itself."""
    names = set()
    for family in Telemetry(["legal"]).registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, ("",))}
    return names


def ray_metrics() -> set[str]:
    """Gauges that Ray's source names: Serve's and the nodes', as exported, with their prefix."""
    package = Path(ray.__file__).parent
    sources = [*(package / "serve" / "_private").glob("*.py")]
    sources += [package / "dashboard" / "modules" / "reporter" / "reporter_agent.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    return {f"ray_{name}" for name in re.findall(r'Gauge\(\s*"((?:serve|node)_\w+)"', text)}


def plain(expression: str) -> str:
    """PromQL with Grafana's variables replaced by values."""
    return expression.replace("$__rate_interval", "5m").replace("$domain", ".*")


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed")
    return found


def run_promtool(promtool: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


def write_rules(folder: Path, groups: list[dict[str, Any]], name: str = "rules.yaml") -> None:
    (folder / name).write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")


def test_every_metric_exists() -> None:
    known = (
        service_metrics() | ray_metrics() | KUBELET | {rule["record"] for rule in rules() if "record" in rule}
    )
    for name, expression in expressions():
        used = set(METRIC.findall(expression))
        assert used, name
        assert used <= known, name


def test_labels_and_buckets_are_those_of_the_telemetry() -> None:
    telemetry = Telemetry(["legal"])
    labels = {
        name
        for family in telemetry.registry.collect()
        for name in family.samples and family.samples[0].labels
    }
    text = (ROOT / "rag_service" / "telemetry.py").read_text(encoding="utf-8")
    for name in ("domain", "outcome", "stage", "cause", "drafter", "position", "result", "replica"):
        assert f'"{name}"' in text
    assert labels <= {"domain", "version", "target", "draft", "replica", "le"}
    from rag_service.telemetry import LATENCY_BUCKETS, OUTCOMES

    buckets = {value for _, text in expressions() for value in re.findall(r'le="([\d.]+)"', text)}
    assert buckets == {"8.0"}
    assert buckets <= {str(bucket) for bucket in LATENCY_BUCKETS}
    outcomes = {
        value
        for _, text in expressions()
        for group in re.findall(r'outcome=~"([\w|]+)"', text)
        for value in group.split("|")
    }
    assert outcomes <= set(OUTCOMES)


def test_causes_and_stages_exist() -> None:
    from generation.types import ROUND_CAUSES
    from rag_service.telemetry import STAGES

    for _, text in expressions():
        for group in re.findall(r'cause=~?"([\w|]+)"', text):
            assert set(group.split("|")) <= set(ROUND_CAUSES)
        for group in re.findall(r'stage=~?"([\w|]+)"', text):
            assert set(group.split("|")) <= set(STAGES)


def test_dashboards_are_those_of_the_script() -> None:
    for name in dashboards.DASHBOARDS:
        written = (dashboards.FOLDER / f"{name}.json").read_text(encoding="utf-8")
        assert written == dashboards.text(name), "run: python k8s/tools/dashboards.py"


def test_every_alert_says_what_and_leads_to_its_runbook_entry() -> None:
    headings = set(re.findall(r"^#+ (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE))
    for rule in rules():
        if "alert" in rule:
            name = rule["alert"]
            assert rule["labels"]["severity"] in ("page", "ticket"), name
            assert {"summary", "description", "runbook_url"} <= set(rule["annotations"]), name
            assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
            assert name in headings, f"{name} has no heading in docs/operations.md"


def test_no_runbook_entry_without_its_alert() -> None:
    headings = re.findall(r"^#+ (Rag[A-Z]\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in rules() if "alert" in rule)


def test_every_alert_has_a_test_or_is_named_here() -> None:
    cases = yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]
    firing = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case["exp_alerts"]}
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    # Of the same shape as their faster neighbours, or one comparison.
    untested = {
        "RagLatencyBudgetBurning", "RagLatencyBudgetLeaking", "RagFailuresBurning", "RagRequestLogDropping",
        "RagSearchSlow",
    }  # fmt: skip
    assert alerts - firing == untested


def test_promtool_accepts_the_rules(promtool: str, tmp_path: Path) -> None:
    write_rules(tmp_path, rule_groups())
    done = run_promtool(promtool, "check", "rules", "rules.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_promtool_accepts_every_query_of_the_dashboards(promtool: str, tmp_path: Path) -> None:
    queries = [
        {"record": f"query:{number}", "expr": plain(text)} for number, (_, text) in enumerate(panels())
    ]
    write_rules(tmp_path, [{"name": "queries", "rules": queries}])
    done = run_promtool(promtool, "check", "rules", "rules.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_pass_their_unit_tests(promtool: str, tmp_path: Path) -> None:
    write_rules(tmp_path, rule_groups())
    shutil.copy(UNIT_TESTS, tmp_path / "alerts.yaml")
    done = run_promtool(promtool, "test", "rules", "alerts.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_tests_catch_a_broken_rule(promtool: str, tmp_path: Path) -> None:
    groups = json.loads(json.dumps(rule_groups()).replace("or absent(ray_serve", "or absent(never_serve"))
    broken = json.loads(json.dumps(groups).replace("> 10 * 0.05", "> 19 * 0.05"))
    write_rules(tmp_path, broken)
    shutil.copy(UNIT_TESTS, tmp_path / "alerts.yaml")
    done = run_promtool(promtool, "test", "rules", "alerts.yaml", folder=tmp_path)
    assert done.returncode != 0
    assert "RagLatencyBudgetBurningFast" in done.stdout + done.stderr


def test_the_services_figures_are_scraped_once_a_cluster() -> None:
    monitors = {item["metadata"]["name"]: item for item in documents(K8S / "monitoring" / "monitors.yaml")}
    assert monitors["rag-service"]["spec"]["selector"]["matchLabels"] == {"ray.io/node-type": "head"}
    ports = {
        endpoint["port"] for item in monitors.values() for endpoint in item["spec"]["podMetricsEndpoints"]
    }
    (service, *_) = documents(K8S / "base" / "rayservice.yaml")
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert ports - {"http"} <= {port["name"] for port in head["ports"]}
