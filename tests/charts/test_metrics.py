"""Alerts and dashboard speak of metrics that exist, and the exporter is found by who scrapes it."""

import json
import re
from typing import get_args

from enginesmith.registry.manifest import Status
from enginesmith.registry.rollouts.rollout_state import State
from pipeline.orchestration.metrics.live import _RUN_STATES, METRICS
from tests.charts.kube import MANIFESTS, label, sample_objects

SERIES = {name for metric in METRICS for name in metric.series}
LABELS = {name for metric in METRICS for name in metric.labels}


def test_alerts_are_about_metrics_of_the_exporter() -> None:
    (rules,) = [item for item in sample_objects("aws") if item["kind"] == "PrometheusRule"]
    for rule in rules["spec"]["groups"][0]["rules"]:
        names = set(re.findall(r"enginesmith_\w+", rule["expr"]))
        assert names, rule["alert"]
        assert names <= SERIES, rule["alert"]
        words = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", words)) <= LABELS, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "remedy"}


def test_alerts_cover_what_ends_stands_or_fails_and_name_states_that_there_are() -> None:
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


def test_the_dashboard_is_the_one_of_the_manifests() -> None:
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
