"""Prometheus metrics of a registry."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Literal

from enginesmith.core.errors import EnginesmithError, HttpAddress, InputError, IntegrityError
from enginesmith.registry.builds.build_history import BUCKETS_S, Totals, read_totals
from enginesmith.registry.builds.runs import model_of, read_runs, run_ids
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.registered_specs import Registration, newest_registrations
from enginesmith.registry.rollouts.rollout_state import UNFINISHED, Rollout
from enginesmith.registry.store import files
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import TOTALS, version_prefix
from enginesmith.registry.store.parallel import side_by_side
from enginesmith.registry.versions.channel_writes import read_rollout, running_rollouts
from enginesmith.registry.versions.index import ListedModel, list_all
from enginesmith.registry.versions.lookup import load
from pipeline.compile.publication.pages import published_document
from pipeline.orchestration.runs.views import RunView, view_runs

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as MetricFamily

    from enginesmith.listening import HttpServer

# Every metric: its name, kind, labels and meaning. Tests compare docs/guides/observability.md and the dashboard.
#
# Labels have few values: the targets and backends of a fleet, our states, and at most `MOST_MODELS` models. No
# digest, version, run or file is a label.

_UNIT = ("target", "backend")


@dataclass(frozen=True)
class RegistryMetric:
    """A metric of a registry. name: without the suffixes that Prometheus adds to counters ('_total') and histograms."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge", "histogram"] = "gauge"

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus stores it."""
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        return tuple(f"{self.name}{suffix}" for suffix in suffixes[self.kind])


BUILDS = RegistryMetric(
    "enginesmith_builds", "Units that were built or failed, by how they ended.", ("state", *_UNIT), kind="counter"
)
BUILD_SECONDS = RegistryMetric(
    "enginesmith_build_duration_seconds", "Wall clock of a unit's build process.", ("state", *_UNIT), kind="histogram"
)
CACHE = RegistryMetric(
    "enginesmith_cache_lookups", "Units that were found built (hit) or had to be built.", ("result",), kind="counter"
)
QUEUE = RegistryMetric("enginesmith_queue_depth", "Units of runs that go on which have not started.")
RUNNING = RegistryMetric("enginesmith_units_running", "Units that are being built now.")
ERRORS = RegistryMetric(
    "enginesmith_registry_errors", "Requests to the registry that failed for good, in this process.", kind="counter"
)
REPEATED = RegistryMetric(
    "enginesmith_registry_retries", "Requests to the registry that were sent again, in this process.", kind="counter"
)
UNPROVEN = RegistryMetric(
    "enginesmith_unproven_engines", "Engines of the newest versions that never ran on their hardware.", _UNIT
)
ENGINES = RegistryMetric(
    "enginesmith_engines", "Units of the newest versions, by their status of today.", ("status", *_UNIT)
)
DRIFT = RegistryMetric(
    "enginesmith_drift_sqnr_db",
    "Lowest SQNR in dB over outputs and cases, at one stage, in the newest proof of the newest version.",
    ("model", "stage", "target", "precision", "backend"),
)
RUNS = RegistryMetric("enginesmith_runs", "Runs that the registry remembers, by state.", ("state",))
LAST_RUN = RegistryMetric("enginesmith_last_run_timestamp_seconds", "When a model's newest run began.", ("model",))
REGISTERED = RegistryMetric(
    "enginesmith_registered_timestamp_seconds", "When a model's newest spec was registered.", ("model",)
)
LAST_RUN_OK = RegistryMetric(
    "enginesmith_last_run_success", "Whether a model's newest run that is over did all it was asked.", ("model",)
)
ROLLOUTS = RegistryMetric(
    "enginesmith_rollouts", "Rollouts by state: not finished, or halted while the exporter ran.", ("state",)
)
ROLLOUT_STEP = RegistryMetric(
    "enginesmith_rollout_step_timestamp_seconds",
    "When a rollout that is not finished made its last step, or a person decided something of it.",
    ("model", "channel"),
)
MODELS = RegistryMetric("enginesmith_models", "Models that have a version.")
LEFT_OUT = RegistryMetric(
    "enginesmith_models_left_out", "Models without series of their own, since there are too many."
)
UNREAD = RegistryMetric(
    "enginesmith_models_unread", "Models whose newest version was not read yet, so that no count of engines has it."
)
UP = RegistryMetric("enginesmith_registry_up", "Whether the registry could be read the last time.")
READ_AT = RegistryMetric("enginesmith_registry_read_timestamp_seconds", "When the registry was last read.")

METRICS = (
    BUILDS, BUILD_SECONDS, CACHE, QUEUE, RUNNING, ERRORS, REPEATED, UNPROVEN, ENGINES, DRIFT, RUNS,
    LAST_RUN, REGISTERED, LAST_RUN_OK, ROLLOUTS, ROLLOUT_STEP, MODELS, LEFT_OUT, UNREAD, UP, READ_AT,
)  # fmt: skip


def family(metric: RegistryMetric, values: Mapping[tuple[str, ...], float]) -> "MetricFamily":
    """A counter or gauge for Prometheus. values: by the labels' values, in the order of `metric.labels`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family_class = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    metric_family = family_class(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        metric_family.add_metric(labels, value)
    return metric_family


@contextmanager
def serve_metrics(registry: "CollectorRegistry", address: HttpAddress) -> Iterator["HttpServer"]:
    """Serve http://HOST:PORT/metrics while inside; the system chooses the port for 0.

    Raises UnavailableError when the port is taken or the address is none of this machine's.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    from enginesmith.listening import HttpAnswer, HttpRequest, HttpServer

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.target.partition("?")[0] != "/metrics":
            return HttpAnswer(404, b"metrics are at /metrics\n")
        return HttpAnswer(200, generate_latest(registry), {"Content-Type": CONTENT_TYPE_LATEST})

    with HttpServer(answer, address, remedy="give another port, or 0") as server:
        yield server


# A registry's numbers for Prometheus, from its own documents: `enginesmith registry metrics`.
#
# A flow's process ends too soon to be scraped, and a catalog has hundreds of them. What they did is in the registry, so
# one exporter has the numbers of all, also of those that died. It reads the registry in the background, and a scrape
# gets the numbers of the last poll at once. Prometheus is imported where the numbers are handed to it.

# Models that have series of their own, the first by name: a model's drift is some 36 series, which for 10,000 models
# would be more than a scrape should bring. Counts of engines are of all models.
MOST_MODELS = 500
# Runs that are read, the newest.
MOST_RUNS = 500
# Versions that a poll reads or checks: changed ones first, then the least recently polled.
MOST_LOOKED_AT = 500
# How old the times of registrations may be; an alert waits for an hour.
REGISTRATIONS_S = 600.0
# States that have a series also where there is no such run, so that a panel shows 0 and not a gap.
_ROLLOUT_STATES = (*UNFINISHED, "halted")
_RUN_STATES = ("running", "done", "failed", "interrupted", "lost")
DriftLabels = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class ModelView:
    """A model's newest version. statuses: number of units by (status, target, backend).  drift: lowest SQNR in dB by
    (model, stage, target, precision, backend), the stage being one of the proof."""

    statuses: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    drift: Mapping[DriftLabels, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RegistryView:
    """The values of each metric by its labels, and the totals, from which the histogram of build times is made."""

    values: Mapping[RegistryMetric, Mapping[tuple[str, ...], float]]
    totals: Totals


def view_of(
    runs: Sequence[RunView],
    models: Sequence[ModelView],
    all_models: int,
    totals: Totals,
    rollouts: Sequence[Rollout | None] = (),
    registered: Sequence[Registration] = (),
) -> RegistryView:
    """The numbers of a poll. runs: the newest first.  models: that were read.  all_models: number of models that have a
    version.  rollouts: that are not finished, or halted; None for one whose document cannot be read.  registered: the
    newest registration of each model."""
    item_counts = Counter(run.item_state(item) for run in runs if run.state == "running" for item in run.run.units)
    run_counts = Counter(run.state for run in runs)
    rollout_counts = Counter("unreadable" if rollout is None else rollout.state for rollout in rollouts)
    engine_counts: Counter[tuple[str, ...]] = Counter()
    for model in models:
        engine_counts.update(model.statuses)
    values: dict[RegistryMetric, Mapping[tuple[str, ...], float]] = {
        BUILDS: {tally.labels: tally.count for tally in totals.builds},
        CACHE: {("hit",): totals.hits, ("miss",): totals.misses},
        QUEUE: {(): item_counts["planned"] + item_counts["waiting"]},
        RUNNING: {(): item_counts["running"]},
        RUNS: {(state,): run_counts[state] for state in _RUN_STATES},
        LAST_RUN: {(run.run.model,): _epoch(run.run.started_at) for run in reversed(runs)},
        REGISTERED: {(spec.bundle.model,): _epoch(spec.at) for spec in registered},
        LAST_RUN_OK: {(run.run.model,): float(run.state == "done") for run in reversed(runs) if run.state != "running"},
        ROLLOUTS: {(state,): rollout_counts[state] for state in (*_ROLLOUT_STATES, "unreadable")},
        ROLLOUT_STEP: {
            (rollout.model, rollout.channel): _epoch(rollout.history[-1].at)
            for rollout in rollouts[:MOST_MODELS]
            if rollout and not rollout.is_finished
        },
        ENGINES: engine_counts,
        UNPROVEN: {labels[1:]: count for labels, count in engine_counts.items() if labels[0] == "unproven"},
        DRIFT: {labels: value for model in models for labels, value in model.drift.items()},
        MODELS: {(): all_models},
        LEFT_OUT: {(): max(0, all_models - MOST_MODELS)},
        UNREAD: {(): all_models - len(models)},
    }
    return RegistryView(values, totals)


@dataclass(frozen=True)
class _Look:
    """What was read of a model: its newest version, the names of the documents beside its manifest, and their
    content."""

    version: str
    keys: tuple[str, ...]
    view: ModelView


class Looker:
    """Reads a registry repeatedly, `MOST_LOOKED_AT` models at a time. A version is read again only when the documents
    beside its manifest changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.listed: Sequence[ListedModel] = ()  # all models, of the last poll
        self._known: dict[str, _Look] = {}  # the one that was polled longest ago first
        self._rollouts: dict[tuple[str, str], Rollout | None] = {}
        self._registered: tuple[float, list[Registration]] = (-math.inf, [])

    def look(self) -> RegistryView:
        """The current numbers. Raises UnavailableError when the registry is out of reach."""
        all_runs = run_ids(self._store)
        model_names = set(sorted({model_of(run) for run in all_runs})[:MOST_MODELS])
        recent_runs = [run for run in all_runs if model_of(run) in model_names][:MOST_RUNS]
        runs = view_runs(self._store, read_runs(self._store, recent_runs))
        self.listed = list_all(self._store)
        newest_versions = {entry.model: entry.versions[-1] for entry in self.listed}
        self._known = {model: poll for model, poll in self._known.items() if model in newest_versions}
        old_versions = {model: poll.version for model, poll in self._known.items()}
        changed_models = [model for model, version in newest_versions.items() if old_versions.get(model) != version]
        due_models = list(dict.fromkeys([*changed_models, *self._known]))[:MOST_LOOKED_AT]
        for model, poll in side_by_side(lambda model: self._model(model, newest_versions[model]), due_models):
            self._known.pop(model, None)
            self._known[model] = poll
        drift_models = set(list(newest_versions)[:MOST_MODELS])
        models = [
            poll.view if model in drift_models else replace(poll.view, drift={}) for model, poll in self._known.items()
        ]
        # Arguments of `view_of`. A halted rollout is no longer running.
        channel_keys = sorted({*running_rollouts(self._store), *self._rollouts})
        rollouts = dict(side_by_side(lambda key: _rollout(self._store, *key), channel_keys))
        self._rollouts = {
            key: rollout for key, rollout in rollouts.items() if rollout is None or rollout.state in _ROLLOUT_STATES
        }
        return view_of(
            runs,
            models,
            len(newest_versions),
            read_totals(self._store.read(TOTALS)),
            list(self._rollouts.values()),
            self._registrations(),
        )

    def _registrations(self) -> list[Registration]:
        """The newest registrations, as they were at most `REGISTRATIONS_S` ago: each is a request."""
        read_at, registrations = self._registered
        if time.monotonic() >= read_at + REGISTRATIONS_S:
            registrations = list(islice(newest_registrations(self._store), MOST_MODELS))
            self._registered = (time.monotonic(), registrations)
        return registrations

    def _model(self, model: str, version: str) -> _Look:
        keys = tuple(self._store.list(version_prefix(model, version)))
        previous_look = self._known.get(model)
        if previous_look and (previous_look.version, previous_look.keys) == (version, keys):
            return previous_look
        return _Look(version, keys, _view(self._store, model, version))


def _rollout(store: Store, model: str, channel: str) -> Rollout | None:
    try:
        return read_rollout(store, model, channel)
    except (InputError, IntegrityError):  # `enginesmith rollout status` gives the reason
        return None


def _view(store: Store, model: str, version: str) -> ModelView:
    """The content of a version's documents; empty if they are damaged (`enginesmith registry fsck` gives the
    reason)."""
    try:
        manifest = load(store, model, version)
        statuses = Counter((str(entry.status), entry.target, entry.backend) for entry in judge_entries(store, manifest))
    except EnginesmithError:
        return ModelView()
    try:
        reports = published_document(store, manifest).reports
    except EnginesmithError:  # the document is a copy for people, and may be damaged without harm
        reports = ()
    drift: dict[DriftLabels, float] = {}
    for report in reports:
        for check in report.checks:
            if check.name == "sqnr_db" and check.value is not None and math.isfinite(check.value):
                drift_key = (model, check.stage, report.target, report.precision, report.backend)
                drift[drift_key] = min(check.value, drift.get(drift_key, check.value))
    return ModelView(statuses, drift)


def _epoch(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


class Exporter:
    """Reads a registry and keeps the numbers; a collector for prometheus-client. say: called when reading fails.

    status: called after each poll with the models of the registry; with None and the reason where it cannot be read.
    """

    def __init__(
        self,
        store: Store,
        say: Callable[[str], object] = lambda _: None,
        status: Callable[[Sequence[ListedModel] | None, str], object] = lambda *_: None,
    ) -> None:
        self._looker, self._say, self._status = Looker(store), say, status
        self._view = view_of((), (), 0, Totals())
        self._up, self._at = False, 0.0

    def refresh(self) -> bool:
        """Poll again. Returns whether it succeeded; if not, the earlier numbers stay."""
        try:
            self._view = self._looker.look()
        except EnginesmithError as error:
            if self._up or not self._at:
                self._say(f"the registry cannot be read: {error}")
            self._up = False
            self._at = self._at or time.time()
            self._status(None, f"the registry cannot be read: {error}")
        else:
            self._up, self._at = True, time.time()
            self._status(self._looker.listed, "")
        return self._up

    def refresh_all(self) -> bool:
        """Poll until every model was read, as `refresh`."""
        while self.refresh():
            if not self._view.values[UNREAD][()]:
                return True
        return False

    def run(self, every_s: float, stop: threading.Event) -> None:
        """Poll repeatedly until `stop` is set."""
        while not stop.wait(every_s):
            self.refresh()

    def registry(self) -> "CollectorRegistry":
        """A Prometheus registry with these metrics alone."""
        from prometheus_client import CollectorRegistry

        collector_registry = CollectorRegistry(auto_describe=False)
        collector_registry.register(self)
        return collector_registry

    def collect(self) -> Iterator["MetricFamily"]:
        """Every metric family, from the last poll."""
        from prometheus_client.core import HistogramMetricFamily

        for metric, values in self._view.values.items():
            yield family(metric, values)
        build_histogram = HistogramMetricFamily(BUILD_SECONDS.name, BUILD_SECONDS.help, labels=BUILD_SECONDS.labels)
        bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
        for tally in self._view.totals.builds:
            buckets = list(zip(bounds, (*tally.buckets, tally.count), strict=True))
            build_histogram.add_metric(tally.labels, buckets, tally.seconds)
        yield build_histogram
        yield family(UP, {(): float(self._up)})
        yield family(READ_AT, {(): self._at})
        # Requests to the registry that failed or were repeated, in this process.
        error_counts = files.read_error_counts()
        yield family(ERRORS, {(): error_counts["errors"]})
        yield family(REPEATED, {(): error_counts["retries"]})
