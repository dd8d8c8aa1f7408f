"""A registry's numbers for Prometheus, from its own documents: `enginesmith registry metrics`.

A flow's process ends too soon to be scraped, and a catalog has hundreds of them. What they did is in the registry, so
one exporter has the numbers of all, also of those that died. It reads the registry in the background, and a scrape gets
the numbers of the last look at once. Prometheus is imported where the numbers are handed to it.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from enginesmith.core.errors import EnginesmithError, InputError, IntegrityError
from enginesmith.registry.builds.build_history import BUCKETS_S, Totals, read_totals
from enginesmith.registry.builds.runs import model_of, read_runs, run_ids
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.rollouts.state import UNFINISHED, Rollout
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import TOTALS, version_prefix
from enginesmith.registry.store.parallel import side_by_side
from enginesmith.registry.versions.index import list_all
from enginesmith.registry.versions.lookup import load
from enginesmith.registry.versions.rolling import read_rollout, running_rollouts
from pipeline.compile.publication.pages import published_document
from pipeline.orchestration.metrics import definitions
from pipeline.orchestration.metrics.definitions import RegistryMetric
from pipeline.orchestration.metrics.live import Trouble, family
from pipeline.orchestration.runs.views import RunView, view_runs

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as MetricFamily

# Models that have series of their own, the first by name: a model's drift is some 36 series, which for 10,000 models
# would be more than a scrape should bring. Counts of engines are of all models.
MOST_MODELS = 500
# Runs that are read, the newest.
MOST_RUNS = 500
# Versions that a look reads or checks, those that changed first, then those that were not looked at for longest.
MOST_LOOKED_AT = 500
# States that have a series also where there is no such run, so that a panel shows 0 and not a gap.
_RUN_STATES = ("running", "done", "failed", "interrupted", "lost")
DriftLabels = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class ModelView:
    """A model's newest version. statuses: number of units by (status, target, backend).  drift: lowest SQNR in dB by
    (model, joint, target, precision, backend), the joint being a stage of the proof."""

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
) -> RegistryView:
    """The numbers of a look. runs: the newest first.  models: that were read.  all_models: number of models that have a
    version.  rollouts: that are not finished; None for one whose document cannot be read."""
    states = Counter(one.item_state(item) for one in runs if one.state == "running" for item in one.run.units)
    counts = Counter(one.state for one in runs)
    rolling = Counter("unreadable" if one is None else one.state for one in rollouts)
    engines: Counter[tuple[str, ...]] = Counter()
    for model in models:
        engines.update(model.statuses)
    values: dict[RegistryMetric, Mapping[tuple[str, ...], float]] = {
        definitions.BUILDS: {tally.labels: tally.count for tally in totals.builds},
        definitions.CACHE: {("hit",): totals.hits, ("miss",): totals.misses},
        definitions.QUEUE: {(): states["planned"] + states["waiting"]},
        definitions.RUNNING: {(): states["running"]},
        definitions.RUNS: {(state,): counts[state] for state in _RUN_STATES},
        definitions.LAST_RUN: {(one.run.model,): _epoch(one.run.started_at) for one in reversed(runs)},
        definitions.LAST_RUN_OK: {
            (one.run.model,): float(one.state == "done") for one in reversed(runs) if one.state != "running"
        },
        definitions.ROLLOUTS: {(state,): rolling[state] for state in (*UNFINISHED, "unreadable")},
        definitions.ROLLOUT_STEP: {
            (one.model, one.channel): _epoch(one.history[-1].at) for one in rollouts[:MOST_MODELS] if one
        },
        definitions.ENGINES: engines,
        definitions.UNPROVEN: {labels[1:]: count for labels, count in engines.items() if labels[0] == "unproven"},
        definitions.DRIFT: {labels: value for model in models for labels, value in model.drift.items()},
        definitions.MODELS: {(): all_models},
        definitions.LEFT_OUT: {(): max(0, all_models - MOST_MODELS)},
        definitions.UNREAD: {(): all_models - len(models)},
    }
    return RegistryView(values, totals)


@dataclass(frozen=True)
class _Look:
    """What was read of a model: its newest version, the names of the documents beside its manifest, what they say."""

    version: str
    keys: tuple[str, ...]
    view: ModelView


class Looker:
    """Reads a registry repeatedly, `MOST_LOOKED_AT` models at a time. A version is read again only when the documents
    beside its manifest changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, _Look] = {}  # the one that was looked at longest ago first

    def look(self) -> RegistryView:
        """The numbers of now. Raises UnavailableError when the registry is out of reach."""
        known = run_ids(self._store)
        shown = set(sorted({model_of(run) for run in known})[:MOST_MODELS])
        read = [run for run in known if model_of(run) in shown][:MOST_RUNS]
        runs = view_runs(self._store, read_runs(self._store, read))
        newest = {item.model: item.versions[-1] for item in list_all(self._store)}
        self._look_at(newest)
        drawn = set(list(newest)[:MOST_MODELS])
        models = [one.view if model in drawn else replace(one.view, drift={}) for model, one in self._known.items()]
        return view_of(runs, models, len(newest), read_totals(self._store.read(TOTALS)), self._rollouts())

    def _rollouts(self) -> list[Rollout | None]:
        """The rollouts that are not finished, as `view_of` takes them."""
        found = side_by_side(lambda where: _rollout(self._store, *where), running_rollouts(self._store))
        return [one for _, one in found if one is None or not one.is_finished]

    def _look_at(self, newest: Mapping[str, str]) -> None:
        """Look at some models. newest: model -> its newest version, of all models."""
        self._known = {model: one for model, one in self._known.items() if model in newest}
        changed = [m for m, version in newest.items() if m not in self._known or self._known[m].version != version]
        turn = list(dict.fromkeys([*changed, *self._known]))[:MOST_LOOKED_AT]
        for model, one in side_by_side(lambda model: self._model(model, newest[model]), turn):
            self._known.pop(model, None)
            self._known[model] = one

    def _model(self, model: str, version: str) -> _Look:
        keys = tuple(self._store.list(version_prefix(model, version)))
        known = self._known.get(model)
        if known and (known.version, known.keys) == (version, keys):
            return known
        return _Look(version, keys, _view(self._store, model, version))


def _rollout(store: Store, model: str, channel: str) -> Rollout | None:
    try:
        return read_rollout(store, model, channel)
    except (InputError, IntegrityError):  # `enginesmith rollout status` gives the reason
        return None


def _view(store: Store, model: str, version: str) -> ModelView:
    """What a version's documents say; nothing where they are damaged, of which `enginesmith registry fsck` gives the
    reason."""
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
                where = (model, check.joint, report.target, report.precision, report.backend)
                drift[where] = min(check.value, drift.get(where, check.value))
    return ModelView(statuses, drift)


def _epoch(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0


class Exporter:
    """Reads a registry and keeps the numbers; a collector for prometheus-client. say: called when reading fails."""

    def __init__(self, store: Store, say: Callable[[str], object] = lambda _: None) -> None:
        self._looker, self._say = Looker(store), say
        self._view = view_of((), (), 0, Totals())
        self._up, self._at = False, 0.0

    def refresh(self) -> bool:
        """Look again. Returns whether that went well; where it did not, the numbers before stay."""
        try:
            self._view = self._looker.look()
        except EnginesmithError as error:
            if self._up or not self._at:
                self._say(f"the registry cannot be read: {error}")
            self._up = False
            self._at = self._at or time.time()
        else:
            self._up, self._at = True, time.time()
        return self._up

    def refresh_all(self) -> bool:
        """Look until every model was read, as `refresh`."""
        while self.refresh():
            if not self._view.values[definitions.UNREAD][()]:
                return True
        return False

    def run(self, every_s: float, stop: threading.Event) -> None:
        """Look again and again until `stop` is set."""
        while not stop.wait(every_s):
            self.refresh()

    def registry(self) -> "CollectorRegistry":
        """A Prometheus registry with these metrics alone."""
        from prometheus_client import CollectorRegistry

        made = CollectorRegistry(auto_describe=False)
        made.register(self)
        made.register(Trouble())
        return made

    def collect(self) -> Iterator["MetricFamily"]:
        """Every metric family, from the last look."""
        from prometheus_client.core import HistogramMetricFamily

        for metric, values in self._view.values.items():
            yield family(metric, values)
        metric = definitions.BUILD_SECONDS
        seconds = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
        for tally in self._view.totals.builds:
            buckets = list(zip(bounds, (*tally.buckets, tally.count), strict=True))
            seconds.add_metric(tally.labels, buckets, tally.seconds)
        yield seconds
        yield family(definitions.UP, {(): float(self._up)})
        yield family(definitions.READ_AT, {(): self._at})
