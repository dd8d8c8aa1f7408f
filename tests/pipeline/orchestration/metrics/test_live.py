"""The metrics of one run: counted from what is told, served on a port that a scraper reaches."""

import json
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from builders.execution.jobs import Usage
from enginesmith.core.errors import HttpAddress, UnavailableError
from enginesmith.registry.store import files
from enginesmith.registry.store.files import reachable
from pipeline.orchestration.metrics import live as definitions
from pipeline.orchestration.metrics.live import LiveMetrics, serve_metrics
from pipeline.progress.events import Finished, Planned, ProcessEnded, Retrying, RunConcluded, Started
from tests.pipeline.orchestration.runs.runs import OTHER, UNIT, plan
from tests.pipeline.projects import Project
from tests.waiting import PATIENCE_S

BUILT = {"state": "built", "target": "sm_89", "backend": "tensorrt-rtx"}


@pytest.fixture
def live() -> LiveMetrics:
    return LiveMetrics()


def value(live: LiveMetrics, name: str, **labels: str) -> float | None:
    return live.registry.get_sample_value(name, labels)


def test_units_wait_run_and_are_counted(live: LiveMetrics) -> None:
    live.emit(Planned(plan()))
    live.emit(Finished(OTHER, "cached"))
    live.emit(Finished("export"))
    assert value(live, "enginesmith_queue_depth") == 1 and value(live, "enginesmith_units_running") == 0
    live.emit(Started(UNIT))
    assert value(live, "enginesmith_queue_depth") == 0 and value(live, "enginesmith_units_running") == 1
    live.emit(Retrying(UNIT, "killed"))
    live.emit(Started(UNIT))
    live.emit(ProcessEnded(UNIT, Usage(7.0, 100.0)))
    live.emit(Finished(UNIT, "built", words="built in 6.5 s"))
    assert value(live, "enginesmith_units_running") == 0 and value(live, "enginesmith_builds_total", **BUILT) == 1
    assert value(live, "enginesmith_build_duration_seconds_sum", **BUILT) == 7.0
    assert value(live, "enginesmith_build_duration_seconds_bucket", **BUILT, le="10.0") == 1
    assert value(live, "enginesmith_build_duration_seconds_bucket", **BUILT, le="5.0") == 0
    assert value(live, "enginesmith_cache_lookups_total", result="hit") == 1
    assert value(live, "enginesmith_cache_lookups_total", result="miss") == 1
    unit = {"target": "sm_89", "backend": "tensorrt-rtx"}
    assert value(live, "enginesmith_build_retries_total", **unit) == 1
    assert value(live, "enginesmith_build_peak_bytes", **unit) == 100 * 2**20


def test_failures_are_a_state_and_unproven_engines_a_gauge(live: LiveMetrics) -> None:
    from enginesmith.registry.manifest import EngineEntry
    from pipeline.outcome import Outcome, UnitResult

    live.emit(Planned(plan()))
    live.emit(Started(UNIT))
    live.emit(Finished(UNIT, "failed", "out of memory"))
    assert value(live, "enginesmith_builds_total", **{**BUILT, "state": "failed"}) == 1
    row = UnitResult(EngineEntry("sm_89", "fp16", "tensorrt-rtx", "unproven", ""))
    outcome = Outcome("digits", "1", False, (row, row, UnitResult(replace(row.entry, status="proven"))), {})
    live.emit(RunConcluded(outcome))
    live.emit(RunConcluded(replace(outcome, engines=(row,))))
    assert value(live, "enginesmith_unproven_engines", target="sm_89", backend="tensorrt-rtx") == 1


def test_errors_of_the_registry_are_counted(live: LiveMetrics) -> None:
    before = value(live, "enginesmith_registry_errors_total")
    with pytest.raises(UnavailableError), reachable("writing"):
        raise OSError(28, "No space left on device")
    files.count_io("retries")
    assert before is not None and value(live, "enginesmith_registry_errors_total") == before + 1
    assert value(live, "enginesmith_registry_retries_total")


def test_a_run_exports_just_the_metrics_that_are_documented_for_it(live: LiveMetrics) -> None:
    found = {family.name for family in live.registry.collect()}
    assert found == {metric.name for metric in definitions.METRICS if "run" in metric.where}


def test_a_scraper_reaches_the_port_while_it_is_served() -> None:
    live = LiveMetrics(CollectorRegistry())
    with serve_metrics(live.registry, HttpAddress("127.0.0.1", 0)) as server:
        port = server.address.port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        assert {family.name for family in text_string_to_metric_families(text)} >= {"enginesmith_builds"}
        with (
            pytest.raises(UnavailableError, match=f"127.0.0.1:{port}: .*give another port"),
            serve_metrics(live.registry, HttpAddress("127.0.0.1", port)),
        ):
            pass
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0, "closed with the run"


def test_a_build_serves_its_metrics_when_it_is_asked_to(built: Project) -> None:
    done = built.build("--quiet", "--metrics", ":0")
    assert done.code == 0 and "metrics: http://127.0.0.1:" in done.err


def test_a_flow_is_told_to_use_the_exporter(built: Project) -> None:
    done = built.build("--runner", "prefect", "--metrics", ":0")
    assert done.code == 2 and "`enginesmith registry metrics`" in done.err


def test_a_build_without_the_option_loads_no_prometheus_and_no_opentelemetry(built: Project) -> None:
    code = (
        "import json, sys\nfrom enginesmith.cli import main\n"
        f"try:\n    main(['build', {str(built.spec)!r}, '--registry', {str(built.registry)!r}, '--quiet'])\n"
        "except SystemExit: pass\n"
        "loaded = {'prometheus_client', 'opentelemetry', 'prefect', 'ray', 'onnx', 'matplotlib'} & set(sys.modules)\n"
        "print(json.dumps(sorted(loaded)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr.splitlines()[-1]) == []


def test_documented_metrics_are_the_exported_ones() -> None:
    text = (Path(__file__).parents[4] / "docs/guides/observability.md").read_text()
    for metric in definitions.METRICS:
        named = f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}`"
        assert named in text, f"{named} is not documented"
        assert all(f"`{label}`" in text for label in metric.labels)
