import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from enginesmith.registry.manifest import Status
from enginesmith.registry.rollouts.rollout_state import State
from pipeline.orchestration.metrics.live import _RUN_STATES, METRICS
from tests.charts.kube import MANIFESTS, label, sample_objects

SERIES = {name for metric in METRICS for name in metric.series}
LABELS = {name for metric in METRICS for name in metric.labels}


def test_alerts_use_metrics_of_the_exporter() -> None:
    (rules,) = [item for item in sample_objects("aws") if item["kind"] == "PrometheusRule"]
    for rule in rules["spec"]["groups"][0]["rules"]:
        names = set(re.findall(r"enginesmith_\w+", rule["expr"]))
        assert names, rule["alert"]
        assert names <= SERIES, rule["alert"]
        words = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", words)) <= LABELS, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "remedy"}


def test_alerts_cover_ends_stalls_and_failures_with_existing_states() -> None:
    (rules,) = [item for item in sample_objects("aws") if item["kind"] == "PrometheusRule"]
    expressions = " ".join(rule["expr"] for rule in rules["spec"]["groups"][0]["rules"])
    for name in (
        "enginesmith_builds_total", "enginesmith_unproven_engines", "enginesmith_registry_errors_total",
        "enginesmith_queue_depth", 'enginesmith_engines{status="failed"}', 'enginesmith_runs{state="lost"}',
        'enginesmith_rollouts{state=~"halted|unreadable"}', "rollout_step_timestamp_seconds > 86400",
    ):  # fmt: skip
        assert name in expressions
    names = {*get_args(State), *get_args(Status), *_RUN_STATES, "unreadable"}
    words = re.findall(r'(?:state|status)=~?"([^"]+)"', expressions)
    assert {name for word in words for name in word.split("|")} <= names


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Prometheus) is not on PATH")
def test_each_alert_fires_alone_when_promtool_runs_it(tmp_path: Path) -> None:
    (rules,) = [item for item in sample_objects("aws") if item["kind"] == "PrometheusRule"]
    cases = Path(__file__).with_name("alerts.yaml").read_text()
    assert all(f'"{rule["alert"]}"' in cases for rule in rules["spec"]["groups"][0]["rules"])
    (tmp_path / "rules.yaml").write_text(json.dumps(rules["spec"]))
    (tmp_path / "alerts.yaml").write_text(cases)
    result = subprocess.run(["promtool", "test", "rules", "alerts.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert not result.returncode, result.stdout + result.stderr


def test_the_dashboard_equals_that_of_the_manifests() -> None:
    (result,) = [item for item in sample_objects("aws") if label(item) == "ConfigMap enginesmith-dashboard"]
    dashboard = json.loads(result["data"]["enginesmith.json"])
    assert dashboard == json.loads((MANIFESTS / "grafana/enginesmith.json").read_text())
    assert result["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_prometheus_finds_the_exporter() -> None:
    result = {label(item): item for item in sample_objects("aws")}
    monitor, service = result["ServiceMonitor enginesmith"], result["Service enginesmith-metrics"]
    deployment = result["Deployment enginesmith-metrics"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert monitor["spec"]["endpoints"][0]["port"] == port["name"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [item["name"] for item in container["ports"]] == [port["targetPort"]]
    assert f"0.0.0.0:{port['port']}" in container["command"]
