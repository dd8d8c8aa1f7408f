"""Which engines a fleet needs, has and lacks, and the builds that close the gaps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

from builders.backends import discovery
from enginesmith.client.resolve import PORTABLE, EngineRanking, Policy, rank_engines
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.text import join_first, pluralize
from enginesmith.core.types import BuildRequest, Precision, Target, accuracy_order
from enginesmith.registry.builds.build_history import Expectation
from enginesmith.registry.manifest import EngineEntry, request_of
from enginesmith.registry.versions.lookup import DEFAULT_CHANNELS
from pipeline.fleet.catalog import Catalog, Demand, Served
from pipeline.fleet.groups import NodeGroup

# Whether the registry has an engine of a model for a group of nodes, as `enginesmith.client.resolve` ranks engines.

# From worst to best. missing: no engine was built for this hardware.  broken: it does not run with the group's driver
# and runtime.  unproven: it never ran on its hardware.  breaking: it will not run with the versions planned.
State = Literal["missing", "broken", "unproven", "breaking", "covered"]
STATES: tuple[State, ...] = ("missing", "broken", "unproven", "breaking", "covered")


@dataclass(frozen=True)
class Coverage:
    """The engine of one model for one group of nodes. precision: the requested one; None for any.

    engine: the one that serves, or whose use `reason` prevents.  fit: how well it fits, in `pull --explain`'s words.
    remarks: conditions that could not be checked.  too_old: whether the driver is too old for a broken engine; a new
    build with the same compiler would not help.
    """

    served: Served
    group: NodeGroup
    precision: Precision | None
    state: State
    engine: EngineEntry | None = None
    fit: str = ""
    reason: str = ""
    remarks: tuple[str, ...] = ()
    too_old: bool = False

    @property
    def demand(self) -> Demand:
        """The demand of this coverage."""
        return self.served.demand

    @property
    def serves(self) -> bool:
        """Whether a node of this group can pull an engine that meets the demand."""
        return self.state in ("covered", "breaking") or (self.state == "unproven" and not self.only_proven)

    @property
    def only_proven(self) -> bool:
        """Whether the catalog or the channel refuses unproven engines."""
        return self.demand.proven or self.served.proven_only

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        entry = self.engine
        return {
            "model": self.demand.reference.model,
            "reference": str(self.demand.reference),
            "version": self.served.version,
            **{name: getattr(self, name) for name in ("precision", "state", "serves")},
            "group": self.group.name,
            "target": self.group.machine.target.name,
            "driver": self.group.machine.driver,
            "nodes": self.group.nodes,
            "engine": None if entry is None else {"unit": entry.unit, "status": entry.status, "digest": entry.digest},
            "fit": self.fit or None,
            "reason": self.reason or None,
            "remarks": list(self.remarks),
        }


# By the index in `versions`, the machine and the requested precision.
Known = dict[tuple[int, Machine, Precision | None], Coverage]


def list_coverage(
    groups: Sequence[NodeGroup], versions: Sequence[Served], catalog: Catalog, results: Known | None = None
) -> tuple[Coverage, ...]:
    """The coverage of every demand on every group that it names. Groups with equal machines are judged once.

    results: of earlier calls with the same `versions` and catalog; new results are added.
    """
    results = {} if results is None else results
    coverages = []
    for index, served_model in enumerate(versions):
        for group in groups:
            if not served_model.demand.wants(group.hardware):
                continue
            for precision in served_model.demand.precisions or (None,):
                key = (index, group.machine, precision)
                if key not in results:
                    results[key] = judge(served_model, group, precision, dict(catalog.planned))
                coverages.append(replace(results[key], group=group))
    return tuple(coverages)


def find_unwanted_groups(groups: Sequence[NodeGroup], demands: Sequence[Demand]) -> tuple[NodeGroup, ...]:
    """Groups with GPUs that no demand names; the catalog may lack them by mistake."""
    return tuple(
        group
        for group in groups
        if not group.machine.is_cpu and not any(demand.wants(group.hardware) for demand in demands)
    )


def judge(version: Served, group: NodeGroup, precision: Precision | None, planned: dict[str, str]) -> Coverage:
    """The coverage of a version on one group. planned: future versions on the group's machines, by name.
    precision: None for any."""
    gap, machine = Coverage(version, group, precision, "missing"), group.machine
    if version.problem:
        return replace(gap, reason=version.problem)
    policy = Policy(precision, proven_only=gap.only_proven)
    ranking = rank_engines(version.engines, machine, policy, version.name, partial(version.find_speeds, machine))
    if not ranking.candidates:
        return _explain_lack(gap, ranking, policy)
    best_engine = ranking.candidates[0]
    coverage = replace(gap, state="covered", engine=best_engine.entry, fit=best_engine.fit, remarks=best_engine.remarks)
    if not machine.is_cpu and planned:
        future_machine = machine.with_facts(runtimes={name: text for name, text in planned.items() if name != "driver"})
        if driver := planned.get("driver"):  # `cuda` is the newest version of the old driver; the new one's is unknown
            future_machine = replace(future_machine, driver=driver, cuda=None)
        future_ranking = rank_engines(version.engines, future_machine, policy, version.name)
        if not future_ranking.candidates:
            return replace(coverage, state="breaking", reason=_find_reason(future_ranking, best_engine.entry))
    if best_engine.entry.status != "proven":
        return replace(coverage, state="unproven", reason=best_engine.entry.reason)
    return coverage


def _explain_lack(gap: Coverage, now: EngineRanking, policy: Policy) -> Coverage:
    """The coverage if no engine qualifies: ranks the engines again, each time with fewer conditions."""
    version, machine, unproven_policy = gap.served, gap.group.machine, replace(policy, proven_only=False)
    if policy.proven_only and (
        candidates := rank_engines(version.engines, machine, unproven_policy, version.name).candidates
    ):
        best_engine = candidates[0]
        coverage = replace(gap, engine=best_engine.entry, fit=best_engine.fit, remarks=best_engine.remarks)
        return replace(coverage, state="unproven", reason=best_engine.entry.reason)
    bare_machine = replace(machine, runtimes={})
    for too_old, relaxed_machine in ((False, bare_machine), (True, replace(bare_machine, driver=None, cuda=None))):
        if candidates := rank_engines(version.engines, relaxed_machine, unproven_policy, version.name).candidates:
            entry, reason = candidates[0].entry, _find_reason(now, candidates[0].entry)
            return replace(gap, state="broken", engine=entry, fit=candidates[0].fit, reason=reason, too_old=too_old)
    return replace(gap, reason=_list_reasons(version, now, machine))


def _find_reason(ranking: EngineRanking, entry: EngineEntry) -> str:
    """Why the ranking rejects an engine; '' if it does not."""
    return next((reason for unit, reason in ranking.rejected if unit == entry.unit), "")


def _list_reasons(version: Served, ranking: EngineRanking, machine: Machine) -> str:
    """Why each engine for this hardware is rejected; if there is none, the targets of the usable engines."""
    near_units = {
        entry.unit
        for entry in version.engines
        if entry.compute_capability == machine.compute_capability and (entry.target != PORTABLE or not machine.is_cpu)
    }
    reasons = list(dict.fromkeys(f"{unit}: {reason}" for unit, reason in ranking.rejected if unit in near_units))
    if reasons:
        return join_first(reasons, 3, "; ")
    targets = sorted({entry.target for entry in version.engines if entry.usable})
    return f"no engine for {machine.target.sm}; {version.name} has {', '.join(targets) or 'no engine at all'}"


# The builds and proofs that all demands need: each once, in order, with its predicted time.

Predictor = Callable[[str, BuildRequest], Expectation | None]


@dataclass(frozen=True)
class Hours:
    """The sum of predictions. hours: of GPU workers; a build occupies one worker of its GPU generation.

    units: the number of predictions in the sum.  unknown: the number of units without a prediction.
    """

    hours: float
    units: int
    unknown: int

    @property
    def words(self) -> str:
        """As a phrase: 'about 1.50 GPU hours for 3 units'."""
        if not self.units:
            return "unknown, because no similar build is recorded" if self.unknown else "nothing to build"
        hours_text = "under 0.01" if self.hours < 0.01 else f"about {self.hours:.2f}"
        unknown_text = f"; {self.unknown} more of unknown length" if self.unknown else ""
        return f"{hours_text} GPU hours for {pluralize(self.units, 'unit')}{unknown_text}"


def total(forecasts: Iterable[Expectation | None]) -> Hours:
    """The sum of predictions; None is a unit without one."""
    items = list(forecasts)
    seconds = [forecast.seconds for forecast in items if forecast is not None and forecast.seconds is not None]
    return Hours(sum(seconds) / 3600, len(seconds), len(items) - len(seconds))


@dataclass(frozen=True)
class WantedUnit:
    """One build or proof. backend: None if no engine of the version suggests one.  model, target, precision: of the
    unit."""

    kind: Literal["build", "prove"]
    model: str
    version: str | None
    target: Target
    precision: Precision | None
    backend: str | None


@dataclass(frozen=True)
class FleetWork:
    """A unit that groups of nodes wait for. nodes: their total number.  channel: of the demand, the first if
    several.

    why: the present state and its reason.  remedy: the action that a person must take first; '' if none.
    refused: why the compiler refuses the unit; '' if it may accept it.  expected: the predicted time; None if unknown.
    engine: digest of the engine to be proven.
    """

    unit: WantedUnit
    groups: tuple[str, ...]
    nodes: int
    channel: str | None
    why: str
    remedy: str = ""
    refused: str = ""
    expected: Expectation | None = None
    engine: str | None = None

    @property
    def name(self) -> str:
        """'digits@3 sm_90 fp16 tensorrt'."""
        unit = self.unit
        version = f"@{unit.version}" if unit.version else ""
        labels = [f"{unit.model}{version}", unit.target.name, unit.precision, unit.backend]
        return " ".join(label for label in labels if label)

    @property
    def ready(self) -> bool:
        """Whether the work can start now."""
        return not self.remedy and not self.refused

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        unit, prediction = self.unit, self.expected
        return {
            **vars(unit),
            "target": unit.target.name,
            **{name: getattr(self, name) for name in ("groups", "nodes", "channel", "why", "engine")},
            "first": self.remedy or None,
            "refused": self.refused or None,
            "predicted": None
            if prediction is None
            else {"seconds": prediction.seconds, "builds": prediction.builds, "basis": prediction.basis},
        }


def work_for(coverage: Iterable[Coverage], predict: Predictor) -> tuple[FleetWork, ...]:
    """All units to build or prove, in this order: ready units first; then the most waiting nodes first; then `stable`
    before other channels; then the shortest first."""
    coverage_by_unit: dict[WantedUnit, list[Coverage]] = {}
    for standing in coverage:
        if standing.state not in ("covered", "breaking"):
            coverage_by_unit.setdefault(_find_unit(standing), []).append(standing)
    work_items = (_describe_work(unit, coverages, predict) for unit, coverages in coverage_by_unit.items())
    return tuple(sorted(work_items, key=_order))


def _find_unit(coverage: Coverage) -> WantedUnit:
    version, entry = coverage.served, coverage.engine
    model = coverage.demand.reference.model
    if entry is not None:
        kind: Literal["build", "prove"] = "prove" if coverage.state == "unproven" else "build"
        return WantedUnit(kind, model, version.version, entry.hardware, entry.precision, entry.backend)
    # The machine's product if the spec names it, else a target of the spec that includes it, else its generation.
    hardware, machine = coverage.group.hardware, coverage.group.machine.target
    spec_targets = [target for target in coverage.served.targets or () if hardware.is_one_of([target])]
    exact_targets = [target for target in spec_targets if target.product and target.product == machine.product]
    target = [*exact_targets, *spec_targets, Target(machine.sm, machine.compute_capability)][0]
    template = next(_list_similar(coverage, target), None)
    precision: Any = coverage.precision or (template.precision if template else None)
    return WantedUnit("build", model, version.version, target, precision, template.backend if template else None)


def _list_similar(coverage: Coverage, target: Target) -> Iterator[EngineEntry]:
    """The version's engines that can be the template for this target, the most similar first; engines whose backend
    accepts the target are before the others."""

    def sort_key(entry: EngineEntry) -> tuple[Any, ...]:
        is_same_sm = entry.compute_capability == target.compute_capability
        return not is_same_sm, not entry.usable, entry.status != "proven", accuracy_order(entry.precision), entry.unit

    entries = (entry for entry in coverage.served.engines if coverage.precision in (None, entry.precision))
    sorted_entries = sorted((entry for entry in entries if entry.hardware.is_cpu == target.is_cpu), key=sort_key)
    yield from (entry for entry in sorted_entries if not _explain_refusal(entry, target))
    yield from sorted_entries


def _describe_work(unit: WantedUnit, waiting: Sequence[Coverage], predict: Predictor) -> FleetWork:
    coverage = waiting[0]
    groups = {coverage.group.hardware: coverage.group for coverage in waiting}
    channels = sorted({coverage.demand.reference.channel for coverage in waiting} - {None}, key=_rank)
    work = FleetWork(
        unit,
        tuple(dict.fromkeys(group.name for group in groups.values())),
        sum(group.nodes for group in groups.values()),
        channels[0] if channels else None,
        f"{coverage.state}: {coverage.reason}",
    )
    if unit.kind == "prove":
        return replace(work, engine=coverage.engine.digest if coverage.engine else None)
    template = coverage.engine or next(_list_similar(coverage, unit.target), None)
    refusal = _explain_refusal(template, unit.target) if template else ""
    work = replace(work, remedy=_find_prerequisite(coverage, unit), refused=refusal)
    request = _request_for(template, unit.target) if template and not work.refused else None
    return work if request is None else replace(work, expected=predict(unit.model, request))


def _find_prerequisite(coverage: Coverage, unit: WantedUnit) -> str:
    """The manual action needed before a build helps; '' if none."""
    version = coverage.served
    if version.problem:
        return "find out why the version cannot be read; if there is none, build it"
    if coverage.too_old:
        return "give these nodes a newer driver, or build with wheels for an older CUDA"
    missing_names = [unit.target.name] if version.targets is not None and unit.target not in version.targets else []
    if unit.precision and version.precisions and unit.precision not in version.precisions:
        missing_names.append(unit.precision)
    if missing_names:
        return f"add {' and '.join(missing_names)} to its spec, and register it again"
    if coverage.state == "missing":
        hardware_key = (coverage.group.machine.compute_capability, unit.target.is_cpu, unit.precision)
        for entry in version.engines:
            if (entry.compute_capability, entry.hardware.is_cpu, entry.precision) == hardware_key:
                outcome = "failed" if entry.status == "failed" else "was refused"
                return f"change its spec: with the present spec, this unit {outcome}"
    return "" if version.registered else "register its spec: `enginesmith prefect register SPEC`"


def _explain_refusal(entry: EngineEntry, target: Target) -> str:
    """The reason why an engine's backend refuses another target; '' if it accepts it or is not installed."""
    request = _request_for(entry, target)
    # The answer does not depend on the weights; without their digest, similar models share a cached answer.
    return "" if request is None else _ask_backend(replace(request, model=""))


@lru_cache(4096)
def _ask_backend(request: BuildRequest) -> str:
    try:
        backend = discovery.configure(request.backend, dict(request.options))
    except EnginesmithError:
        return ""
    return (backend.refuses(request) or "") if backend.versions() else ""


def _request_for(entry: EngineEntry, target: Target) -> BuildRequest | None:
    """The request of an engine, for another target; None if the entry's fields do not give its build key."""
    try:
        return replace(request_of(entry), target=target)
    except EnginesmithError:
        return None


def _rank(channel: str | None) -> tuple[int, str]:
    is_default = channel in DEFAULT_CHANNELS
    return DEFAULT_CHANNELS.index(str(channel)) if is_default else len(DEFAULT_CHANNELS), channel or ""


def _order(work: FleetWork) -> tuple[Any, ...]:
    seconds = work.expected.seconds if work.expected else None
    duration_s = float("inf") if seconds is None else seconds
    return not work.ready, -work.nodes, _rank(work.channel), duration_s, work.unit.kind, work.name
