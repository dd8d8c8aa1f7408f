"""The metrics of a registry, from its own documents, after real builds; and the dashboard that shows them."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginesmith.core.codec import encode
from enginesmith.core.errors import UnavailableError, canonical_json
from enginesmith.registry.registered_specs import Registration, SpecBundle
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.folder import FileStore
from enginesmith.registry.store.layout import channel_key, registered_key, run_key
from enginesmith.registry.versions import channels
from pipeline.orchestration.metrics import live
from pipeline.orchestration.metrics.live import Exporter, Looker
from pipeline.rollout import operations
from pipeline.rollout.operations import Operator
from tests.enginesmith.registries import engine, publish_engines
from tests.pipeline.orchestration.runs.runs import run_state, running
from tests.pipeline.projects import Project, raising
from tests.pipeline.rollout.fleet import at, begin, begin_and_look, look, plan, reached, registry, tell

DASHBOARD = Path(__file__).parents[4] / "manifests" / "grafana" / "enginesmith.json"


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_registry_exports_builds_runs_engines_and_drift(built: Project) -> None:
    result = built.run("registry", "metrics", "--once")
    actual = samples(result.out)
    assert result.code == 0
    assert actual["enginesmith_builds_total", ("built", "cpu", "onnxruntime")] == 2
    assert actual["enginesmith_build_duration_seconds_count", ("built", "sm_89", "tensorrt-rtx")] == 2
    assert actual["enginesmith_build_duration_seconds_bucket", ("+Inf", "built", "sm_89", "tensorrt-rtx")] == 2
    assert actual["enginesmith_cache_lookups_total", ("miss",)] == 5
    assert actual["enginesmith_unproven_engines", ("sm_89", "tensorrt-rtx")] == 2
    assert actual["enginesmith_engines", ("cpu", "onnxruntime", "proven")] == 2
    assert actual["enginesmith_runs", ("done",)] == 1 and actual["enginesmith_runs", ("lost",)] == 0
    assert actual["enginesmith_last_run_success", ("tiny",)] == 1 and actual["enginesmith_registry_up", ()] == 1
    assert 10 < actual["enginesmith_drift_sqnr_db", ("cpu", "engine", "int8", "onnxruntime", "tiny")] < 200
    assert ("enginesmith_drift_sqnr_db", ("engine", "int8", "sm_89", "tensorrt-rtx", "tiny")) not in actual, "unproven"


def test_a_registry_exports_only_its_documented_metrics(built: Project) -> None:
    exporter = Exporter(built.store)
    assert exporter.refresh()
    result = {family.name for family in exporter.registry().collect()}
    assert result == {metric.name for metric in live.METRICS}
    labels = {
        (family.name, name)
        for family in exporter.registry().collect()
        for sample in family.samples
        for name in sample.labels
        if name != "le"
    }
    assert labels <= {(metric.name, label) for metric in live.METRICS for label in metric.labels}


def test_a_registered_spec_has_a_time_which_is_read_every_ten_minutes(store: Store, monkeypatch: Any) -> None:
    bundle = SpecBundle("digits", "spec.yaml", {"spec.yaml": "0" * 64})
    item = Registration(bundle, "2026-01-01T00:00:00+00:00", "somebody")
    store.create(registered_key("digits"), canonical_json({"registered": [encode(item)]}))
    looker = Looker(store)
    (result,) = looker.look().values[live.REGISTERED].items()
    assert result[0] == ("digits",) and result[1] > 1.7e9
    monkeypatch.setattr(live, "newest_registrations", lambda _: pytest.fail("one request for each model"))
    assert looker.look().values[live.REGISTERED] == dict([result])


def test_running_and_lost_runs_are_counted(store: Store, tmp_path: Path) -> None:
    lost_run, result = running(1), run_state(2, "other", state="failed")
    for run in (lost_run, result):
        store.create(run_key(run.id), run.to_bytes())
    os.utime(tmp_path / "registry" / run_key(lost_run.id), (0, 0))
    view = Looker(store).look()
    counts = {state: count for (state,), count in view.values[live.RUNS].items() if count}
    assert counts == {"lost": 1, "failed": 1}
    assert view.values[live.QUEUE] == view.values[live.RUNNING] == {(): 0}
    assert view.values[live.LAST_RUN_OK] == {("digits",): 0.0, ("other",): 0.0}
    assert view.values[live.LAST_RUN]["digits",] > 1.7e9


def test_unfinished_rollouts_have_their_last_move(store: Store) -> None:
    for model in ("digits", "letters"):
        manifest, two = (publish_engines(store, [engine(store)], name, model=model).manifest for name in ("one", "two"))
        channels.promote(store, manifest, "stable")
        begin(store, two, plan("5%", "100%"))
    operations.pause(store, "letters", "stable", Operator("ada", at(60)))
    view = Looker(store).look()
    assert view.values[live.ROLLOUTS] == {
        ("running",): 1, ("paused",): 1, ("halted",): 0, ("unreadable",): 0,
    }  # fmt: skip
    steps = view.values[live.ROLLOUT_STEP]
    assert steps["letters", "stable"] - steps["digits", "stable"] == 60
    operations.abort(store, "letters", "stable", Operator("ada", at(61)))
    key = channel_key("digits", "stable")
    assert store.replace(key, b"{}", store.read(key))
    view = Looker(store).look()
    assert {state for (state,), count in view.values[live.ROLLOUTS].items() if count} == {"unreadable"}


def test_a_halted_rollout_is_counted_until_the_next_one() -> None:
    store, _, second_manifest = registry()
    rollout = begin_and_look(store, second_manifest, plan("50%", "100%", errors_ppm=10_000))
    looker = Looker(store)
    assert looker.look().values[live.ROLLOUTS]["running",] == 1
    tell(store, rollout, 20, reached(rollout)[:50], requests=1000, errors=60)
    assert look(store, 50).action == "halted"
    for _ in range(2):
        view = looker.look()
        assert view.values[live.ROLLOUTS]["halted",] == 1 and not view.values[live.ROLLOUT_STEP]
    begin(store, second_manifest, plan("100%"), 60)
    assert {state for (state,), count in looker.look().values[live.ROLLOUTS].items() if count} == {"running"}


def test_models_beyond_the_limit_have_no_series(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_MODELS", 0)
    view = Looker(built.store).look()
    assert view.values[live.ENGINES] and not view.values[live.DRIFT]  # counts are of all models
    assert not view.values[live.LAST_RUN] and view.values[live.LEFT_OUT] == view.values[live.MODELS] == {(): 1}


def test_an_unchanged_version_is_not_read_again(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    looker = Looker(built.store)
    first_look = looker.look()
    monkeypatch.setattr(live, "load", None)
    assert looker.look().values == first_look.values


def test_a_poll_reads_some_models_and_all_in_turn(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """New versions come first; then those that were not looked at for longest."""
    monkeypatch.setattr(live, "MOST_LOOKED_AT", 2)
    for name in "abcde":
        publish_engines(store, [engine(store)], "1", model=name)
    exporter = Exporter(store)
    assert exporter.refresh_all()
    (unread_now,) = (metric for metric in exporter.collect() if metric.name == "enginesmith_models_unread")
    assert unread_now.samples[0].value == 0
    looker, counts, unread_items = Looker(store), [], []
    looked_at: list[list[str]] = []
    loaded_model = Looker._model

    def note(self: Looker, model: str, version: str) -> Any:
        looked_at[-1].append(f"{model}@{version}")
        return loaded_model(self, model, version)

    monkeypatch.setattr(Looker, "_model", note)
    for _ in range(4):
        looked_at.append([])
        view = looker.look()
        counts.append(sum(view.values[live.ENGINES].values()))
        unread_items.append(view.values[live.UNREAD][()])
    assert counts == [2, 4, 5, 5] and unread_items == [3, 1, 0, 0]
    publish_engines(store, [engine(store), engine(store, precision="fp16")], "2", model="d")
    looked_at.append([])
    assert sum(looker.look().values[live.ENGINES].values()) == 6
    assert [sorted(models) for models in looked_at] == [
        ["a@1", "b@1"], ["c@1", "d@1"], ["a@1", "e@1"], ["b@1", "c@1"], ["d@2", "e@1"]
    ]  # fmt: skip


def test_an_unreachable_registry_is_reported_and_the_last_data_stays(built, monkeypatch):
    output: list[str] = []
    exporter = Exporter(built.store, output.append)
    exporter.refresh()
    monkeypatch.setattr(FileStore, "children", raising(UnavailableError("the disk is gone")))
    assert not exporter.refresh() and not exporter.refresh()
    values = {sample.name: sample.value for family in exporter.collect() for sample in family.samples}
    assert values["enginesmith_registry_up"] == 0 and values["enginesmith_models"] == 1
    assert len(output) == 1 and "the disk is gone" in output[0]


def test_the_exporter_polls_until_it_is_stopped(store: Store) -> None:
    stop, looks = threading.Event(), []
    exporter = Exporter(store)
    exporter.refresh = lambda: bool(looks.append(len(looks) == 2 and stop.set()))
    exporter.run(0.001, stop)
    assert len(looks) == 3


def test_the_dashboard_shows_all_existing_metrics() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    metrics_by_series = {series: metric for metric in live.METRICS for series in metric.series}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    used_names = {name for query in queries for name in re.findall(r"enginesmith_\w+", query)}
    assert used_names <= set(metrics_by_series), f"no such metrics: {used_names - set(metrics_by_series)}"
    shown_names = {metrics_by_series[name].name for name in used_names}
    assert shown_names == {metric.name for metric in live.METRICS}, "the dashboard leaves some out"
    for query in queries:
        for name, selector in re.findall(r"(enginesmith_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)\s*=~?", selector)) <= {"job", *metrics_by_series[name].labels}, query
        for grouped_match in re.findall(r"by \(([^)]*)\)", query):
            names = {"le"}.union(*(metrics_by_series[name].labels for name in re.findall(r"enginesmith_\w+", query)))
            assert set(re.split(r",\s*", grouped_match)) <= names, query
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in dashboard["panels"]}) == len(places)
