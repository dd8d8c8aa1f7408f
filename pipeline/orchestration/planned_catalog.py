"""What a build of every spec of a catalog would do, as far as that is on record; nothing is run."""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from threading import Lock

from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.core.text import pluralize
from enginesmith.registry.builds.record_copies import RecordCopies, StoreListing
from pipeline.compile.caches.plan import plan_caches
from pipeline.compile.composition import Run
from pipeline.compile.forecast import on_record, open_records
from pipeline.compile.plan import candidates, plan_builds
from pipeline.intake.places import Found, registry_of, spec_at
from pipeline.orchestration.ensembles import foresee_ensemble
from pipeline.orchestration.run import RunOptions, select, store_named
from pipeline.progress import Progress
from pipeline.spec.document import is_ensemble
from pipeline.spec.ensembles.model import LoadedEnsemble, load_ensemble
from pipeline.spec.model import ModelSpec

# Threads that mostly wait for a store's answers.
READERS = 32
# Specs that are worth a process of their own: each process lists the store by itself.
LEAST_SHARE = 500
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class PlannedSpec:
    """What a build of one spec would do. units: how many by action, as in `UnitForecast`.

    missing: the steps that are not on record.  reason: why the spec cannot be planned.
    """

    spec: str
    model: str | None
    units: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    reason: str = ""

    @property
    def settled(self) -> bool:
        """Whether every engine that can be built is there."""
        return not self.reason and not self.units.keys() - {"cached", "refused"}

    def to_json(self) -> dict[str, object]:
        """A row of `enginesmith plan --all --json`."""
        return asdict(self)


class Listings:
    """The listing of each registry, so that specs of one registry share it; for several threads."""

    def __init__(self) -> None:
        self._known: dict[str, StoreListing] = {}
        self._lock = Lock()

    def of(self, spec: ModelSpec, options: RunOptions) -> StoreListing:
        """That of a spec's registry, which is opened for the first of its specs."""
        uri = registry_of(spec, options.registry)
        with self._lock:
            if uri not in self._known:
                self._known[uri] = StoreListing(store_named(uri))
            return self._known[uri]


def plan_catalog(addresses: Sequence[str | Found], options: RunOptions) -> list[PlannedSpec]:
    """A row for each spec, in order; one that cannot be planned does not stop the others.

    Many specs are shared out over processes, one for each CPU or as many as options.jobs says.
    """
    processes = min(options.jobs or os.cpu_count() or 1, len(addresses) // LEAST_SHARE)
    if processes < 2:
        return _plan_share(addresses, options)
    size = -(-len(addresses) // processes)
    shares = [addresses[start : start + size] for start in range(0, len(addresses), size)]
    # Forked: they take over what is imported, and no thread runs here yet.
    with ProcessPoolExecutor(len(shares), get_context("fork")) as pool:
        return [row for rows in pool.map(partial(_plan_share, options=options), shares) for row in rows]


def _plan_share(addresses: Sequence[str | Found], options: RunOptions) -> list[PlannedSpec]:
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(partial(_plan_row, options=options, listings=Listings()), addresses))


def _plan_row(address: str | Found, options: RunOptions, listings: Listings) -> PlannedSpec:
    try:
        with spec_at(address, options.registry) as found:
            if is_ensemble(found.path):
                return replace(_plan_ensemble(load_ensemble(found.path, found.address), options), spec=str(address))
            spec = found.load()
            return replace(plan_spec(spec, options, listings.of(spec, options)), spec=str(address))
    except EnginesmithError as error:
        return PlannedSpec(str(address), None, reason=str(error))


def _plan_ensemble(loaded: LoadedEnsemble, options: RunOptions) -> PlannedSpec:
    """What a build of an ensemble would do by the records of its registry: units of its graphs and of the whole."""
    found = foresee_ensemble(loaded, options, Progress(), no_export=True)
    units = Counter(unit.action for unit in found.units)
    for graph in found.graphs.values():
        units.update(unit.action for unit in graph.units)
        units.update(unit.action for unit in graph.caches)
    missing = dict.fromkeys(f"{name}: {step}" for name, graph in found.graphs.items() for step in graph.missing)
    return PlannedSpec(loaded.spec.address, loaded.model, dict(units), tuple(missing))


def plan_spec(spec: ModelSpec, options: RunOptions, listing: StoreListing) -> PlannedSpec:
    """What a build of a spec would do by the records of a store; a unit whose graph is not on record is 'unknown'.

    The copies of the records that were read are renewed, where this user may write.
    """
    selection, copies = select(spec, options), RecordCopies(listing, spec.model)
    context = replace(open_records(listing.store), copies=copies, elsewhere=options.executor != "local")
    run = Run(spec, context, selection)
    known, units = on_record(run), Counter[str]()
    if known.exported is not None:
        plan = plan_builds(known.exported, known.graphs, run)
        units.update(unit.action for unit in plan.units)
    units[_UNKNOWN] += len(candidates(spec, selection)) - units.total()
    units.update(unit.action for unit in plan_caches(spec, selection, known.exported, context))
    _save(copies)
    return PlannedSpec(spec.address, spec.model, dict(+units), known.missing)


def _save(copies: RecordCopies) -> None:
    try:
        copies.save()
    except UnavailableError:
        return  # a registry that may only be read: the next plan reads the records one by one again


def summarize(rows: Sequence[PlannedSpec]) -> str:
    """'4 specs: 3 with nothing to do; 40 units: 36 cached, 4 build'."""
    counts = sum((Counter(row.units) for row in rows), Counter[str]())
    units = ", ".join(f"{count} {action}" for action, count in counts.most_common())
    settled = sum(row.settled for row in rows)
    return f"{pluralize(len(rows), 'spec')}: {settled} with nothing to do; {pluralize(counts.total(), 'unit')}: {units}"
