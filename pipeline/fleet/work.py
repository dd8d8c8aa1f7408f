"""The builds and proofs after which every demand is met, each once, in order, with the time they will probably take."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from builders.backends import discovery
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.ranking import accuracy_order
from enginesmith.core.types import BuildRequest, Precision, Target
from enginesmith.registry.builds.build_history import Expectation, History
from enginesmith.registry.manifest import EngineEntry, request_of
from enginesmith.registry.store.base import Store
from enginesmith.registry.versions.lookup import DEFAULT_CHANNELS
from pipeline.fleet.coverage import Coverage

Predictor = Callable[[str, BuildRequest], Expectation | None]


@dataclass(frozen=True)
class Hours:
    """The sum of predictions. hours: of GPU workers, in which a build for a generation holds one of its workers.

    units: how many it is the sum of.  fewest, most: finished builds that one of those predictions rests on.
    unknown: units without a prediction.
    """

    hours: float
    units: int
    fewest: int
    most: int
    unknown: int

    @property
    def words(self) -> str:
        """As a phrase: 'about 1.50 GPU hours for 3 units, each predicted from 2 finished builds'."""
        if not self.units:
            return "how long it takes is not known: no build like these is on record" if self.unknown else "nothing"
        units = f"{self.units} unit" + ("s" if self.units > 1 else "")
        builds = str(self.most) if self.fewest == self.most else f"{self.fewest} to {self.most}"
        rest = f"; {self.unknown} more of unknown length" if self.unknown else ""
        return f"about {self.hours:.2f} GPU hours for {units}, each predicted from {builds} finished builds{rest}"

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return asdict(self)


def total(forecasts: Iterable[Expectation | None]) -> Hours:
    """The sum of predictions; None is a unit without one."""
    items = list(forecasts)
    known = [(item.seconds, item.builds) for item in items if item is not None and item.seconds is not None]
    builds = [count for _, count in known] or [0]
    hours = sum(seconds for seconds, _ in known) / 3600
    return Hours(hours, len(known), min(builds), max(builds), len(items) - len(known))


def predictor(store: Store) -> Predictor:
    """A function that predicts a build of a model from the registry's history of builds."""
    return History(store).predict


@dataclass(frozen=True)
class WantedUnit:
    """One build or proof. backend: None where no engine of the version tells which to use."""

    kind: Literal["build", "prove"]
    model: str
    version: str | None
    target: Target
    precision: Precision | None
    backend: str | None


@dataclass(frozen=True)
class FleetWork:
    """A unit that groups of nodes wait for. nodes: number of nodes in them.  channel: of the demand, the first if
    several.

    why: the present state and its reason.  first: what a person has to do before it can be done; '' for nothing.
    refused: why no compiler takes it; '' where one may.  expected: the predicted time; None if unknown.
    engine: digest of the engine to be proven.
    """

    unit: WantedUnit
    groups: tuple[str, ...]
    nodes: int
    channel: str | None
    why: str
    first: str = ""
    refused: str = ""
    expected: Expectation | None = None
    engine: str | None = None

    @property
    def name(self) -> str:
        """'digits@3 sm_90 fp16 tensorrt'."""
        unit = self.unit
        version = f"@{unit.version}" if unit.version else ""
        words = [f"{unit.model}{version}", unit.target.name, unit.precision, unit.backend]
        return " ".join(word for word in words if word)

    @property
    def ready(self) -> bool:
        """Whether it can be done as things are."""
        return not self.first and not self.refused

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        unit, expected = self.unit, self.expected
        return {
            **vars(unit),
            "target": unit.target.name,
            "groups": list(self.groups),
            "nodes": self.nodes,
            "channel": self.channel,
            "why": self.why,
            "first": self.first or None,
            "refused": self.refused or None,
            "engine": self.engine,
            "predicted": None
            if expected is None
            else {"seconds": expected.seconds, "builds": expected.builds, "basis": expected.basis},
        }


def work_for(coverage: Iterable[Coverage], predict: Predictor) -> tuple[FleetWork, ...]:
    """All units to build or prove. First those that can be done now; then by the number of nodes that wait, the most
    first; then `stable` before other channels; then the shortest."""
    found: dict[WantedUnit, list[Coverage]] = {}
    for item in coverage:
        if item.state not in ("covered", "breaking"):
            found.setdefault(_find_unit(item), []).append(item)
    return tuple(sorted((_describe_work(unit, waiting, predict) for unit, waiting in found.items()), key=_order))


def _find_unit(item: Coverage) -> WantedUnit:
    served, entry = item.served, item.engine
    model = item.demand.reference.model
    if entry is not None:
        kind: Literal["build", "prove"] = "prove" if item.state == "unproven" else "build"
        return WantedUnit(kind, model, served.version, entry.hardware, entry.precision, entry.backend)
    target = _choose_target(item)
    like = next(_list_similar(item, target), None)
    precision: Any = item.precision or (like.precision if like else None)
    return WantedUnit("build", model, served.version, target, precision, like.backend if like else None)


def _choose_target(item: Coverage) -> Target:
    """The spec's target for this hardware: its product where the spec names that, else its generation."""
    hardware, machine = item.group.hardware, item.group.machine.target
    named = [target for target in item.served.targets or () if hardware.is_one_of([target])]
    exact = [target for target in named if target.product and target.product == machine.product]
    return [*exact, *named, Target(machine.sm, machine.compute_capability)][0]


def _list_similar(item: Coverage, target: Target) -> Iterator[EngineEntry]:
    """The version's engines after which one for this target could be built, the most similar first; those whose backend
    takes the target come before the others."""

    def sort_key(entry: EngineEntry) -> tuple[Any, ...]:
        same = entry.compute_capability == target.compute_capability
        return not same, not entry.usable, entry.status != "proven", accuracy_order(entry.precision), entry.unit

    entries = (entry for entry in item.served.engines if item.precision in (None, entry.precision))
    wanted = sorted((entry for entry in entries if entry.hardware.is_cpu == target.is_cpu), key=sort_key)
    yield from (entry for entry in wanted if not _explain_refusal(entry, target))
    yield from wanted


def _describe_work(unit: WantedUnit, waiting: Sequence[Coverage], predict: Predictor) -> FleetWork:
    first = waiting[0]
    groups = {item.group.hardware: item.group for item in waiting}
    channels = sorted({item.demand.reference.channel for item in waiting} - {None}, key=_rank)
    work = FleetWork(
        unit,
        tuple(dict.fromkeys(group.name for group in groups.values())),
        sum(group.nodes for group in groups.values()),
        channels[0] if channels else None,
        f"{first.state}: {first.reason}",
    )
    if unit.kind == "prove":
        return replace(work, engine=first.engine.digest if first.engine else None)
    like = first.engine or next(_list_similar(first, unit.target), None)
    work = replace(
        work, first=_find_prerequisite(first, unit), refused=_explain_refusal(like, unit.target) if like else ""
    )
    request = _request_for(like, unit.target) if like and not work.refused else None
    return work if request is None else replace(work, expected=predict(unit.model, request))


def _find_prerequisite(item: Coverage, unit: WantedUnit) -> str:
    """What a person has to do before a build helps; '' for nothing."""
    served = item.served
    if served.problem:
        return "see why it cannot be read; build it if it was never built"
    if item.too_old:
        return "give these nodes a newer driver, or build with wheels for an older CUDA"
    lacks = [unit.target.name] if served.targets is not None and unit.target not in served.targets else []
    if unit.precision and served.precisions and unit.precision not in served.precisions:
        lacks.append(unit.precision)
    if lacks:
        return f"add {' and '.join(lacks)} to its spec, and register it again"
    if item.state == "missing":
        wanted = (item.group.machine.compute_capability, unit.target.is_cpu, unit.precision)
        for entry in served.engines:
            if (entry.compute_capability, entry.hardware.is_cpu, entry.precision) == wanted:
                fate = "failed" if entry.status == "failed" else "was refused"
                return f"it {fate} when the version was built; the same spec would give the same"
    return "" if served.registered else "register its spec: `enginesmith prefect register SPEC`"


def _explain_refusal(entry: EngineEntry, target: Target) -> str:
    """Why the backend of an engine does not take another target; '' where it may, or is not installed to be asked."""
    request = _request_for(entry, target)
    # The answer does not depend on the weights, and many models are alike apart from them.
    return "" if request is None else _ask_backend(replace(request, model=""))


@lru_cache(4096)
def _ask_backend(request: BuildRequest) -> str:
    try:
        backend = discovery.configure(request.backend, dict(request.options))
    except EnginesmithError:
        return ""
    return (backend.refuses(request) or "") if backend.versions() else ""


def _request_for(entry: EngineEntry, target: Target) -> BuildRequest | None:
    """The request of an engine, for another target; None for an entry that keeps too little of its own."""
    try:
        return replace(request_of(entry), target=target)
    except EnginesmithError:
        return None


def _rank(channel: str | None) -> tuple[int, str]:
    known = channel in DEFAULT_CHANNELS
    return DEFAULT_CHANNELS.index(str(channel)) if known else len(DEFAULT_CHANNELS), channel or ""


def _order(work: FleetWork) -> tuple[Any, ...]:
    seconds = work.expected.seconds if work.expected else None
    unknown = float("inf") if seconds is None else seconds
    return not work.ready, -work.nodes, _rank(work.channel), unknown, work.unit.kind, work.name
