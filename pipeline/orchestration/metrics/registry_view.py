"""What a registry's documents say about its runs, builds and engines, in numbers; without Prometheus."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from enginery.core.errors import EngineryError
from enginery.registry.evidence.attestations import judged
from enginery.registry.runs.journal import model_of, read_runs, run_ids
from enginery.registry.runs.totals import Totals, read_totals
from enginery.registry.store.base import Store
from enginery.registry.store.keys import TOTALS, version_prefix
from enginery.registry.versions.lookup import catalogue, load
from pipeline.compile.publication.pages import published_document
from pipeline.orchestration.runs.shown import seen

# Models that have series of their own, by name; and runs that are read, the newest.
MOST_MODELS = 500
MOST_RUNS = 500
Joint = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class ModelView:
    """A model's newest version. statuses: how many units of (status, target, backend).  drift: lowest SQNR in dB by
    (model, joint, target, precision, backend)."""

    statuses: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    drift: Mapping[Joint, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RegistryView:
    """One look. runs: how many in which state.  waiting, running: units of runs that go on.

    last_runs: when each model's newest run began (seconds since 1970).  last_ok: whether the newest that is over was
    'done'.
    """

    totals: Totals = field(default_factory=Totals)
    runs: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0
    running: int = 0
    last_runs: Mapping[str, float] = field(default_factory=dict)
    last_ok: Mapping[str, bool] = field(default_factory=dict)
    models: Mapping[str, ModelView] = field(default_factory=dict)
    left_out: int = 0


class Looker:
    """Looks at a registry again and again; versions that did not change since are not read again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, tuple[tuple[str, ...], ModelView]] = {}

    def look(self) -> RegistryView:
        """Raises UnavailableError when the registry is out of reach."""
        found = [seen(run) for run in read_runs(self._store, self._runs())]
        items = [(one, item) for one in found if one.state == "running" for item in one.run.units]
        states = Counter(one.item_state(item) for one, item in items)
        versions = [(listed.model, listed.versions[-1]) for listed in catalogue(self._store)]
        self._known = {model: self._model(model, version) for model, version in versions[:MOST_MODELS]}
        return RegistryView(
            totals=read_totals(self._store.read(TOTALS)),
            runs=Counter(one.state for one in found),
            waiting=states["planned"] + states["waiting"],
            running=states["running"],
            last_runs={one.run.model: _epoch(one.run.started_at) for one in reversed(found)},
            last_ok={one.run.model: one.state == "done" for one in reversed(found) if one.state != "running"},
            models={model: view for model, (_, view) in self._known.items()},
            left_out=max(0, len(versions) - MOST_MODELS),
        )

    def _runs(self) -> list[str]:
        """The newest runs, of at most so many models."""
        known = run_ids(self._store)
        models = set(sorted({model_of(run) for run in known})[:MOST_MODELS])
        return [run for run in known if model_of(run) in models][:MOST_RUNS]

    def _model(self, model: str, version: str) -> tuple[tuple[str, ...], ModelView]:
        """What lies beside a manifest says whether anything was said of it since."""
        keys = tuple(self._store.list(version_prefix(model, version)))
        known = self._known.get(model)
        return known if known and known[0] == keys else (keys, _view(self._store, model, version))


def _view(store: Store, model: str, version: str) -> ModelView:
    """A version that is damaged counts for nothing here; `enginery verify` says what is wrong with it."""
    try:
        manifest = load(store, model, version)
        statuses = Counter((str(entry.status), entry.target, entry.backend) for entry in judged(store, manifest))
    except EngineryError:
        return ModelView()
    try:
        drift = _drift(model, published_document(store, manifest)["reports"])
    except (EngineryError, KeyError, TypeError, AttributeError):  # a copy for reading, that anything may be in
        drift = {}
    return ModelView(statuses, drift)


def _drift(model: str, reports: list[dict[str, Any]]) -> dict[Joint, float]:
    found: dict[Joint, float] = {}
    for report in reports:
        for check in report["checks"]:
            value = check["value"]
            if check["name"] == "sqnr_db" and isinstance(value, int | float):
                where = (model, check["joint"], report["target"], report["precision"], report["backend"])
                found[where] = min(value, found.get(where, value))
    return found


def _epoch(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return 0.0
