"""How a model stands on a group of nodes, as `enginery.client.resolve` judges its engines for their machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from enginery.client.resolve import PORTABLE, EngineRanking, Policy, rank_engines
from enginery.core.hardware.machine import Machine
from enginery.core.text import join_first
from enginery.core.types import Precision
from enginery.registry.manifest import EngineEntry
from pipeline.fleet.catalog import Catalog, Demand, Served
from pipeline.fleet.groups import NodeGroup

# From worst to best. missing: nothing was built for this hardware.  broken: what was built does not run with the driver
# and runtime that are there.  unproven: it never ran on its hardware.  breaking: it will not run with those planned.
State = Literal["missing", "broken", "unproven", "breaking", "covered"]
STATES: tuple[State, ...] = ("missing", "broken", "unproven", "breaking", "covered")


@dataclass(frozen=True)
class Coverage:
    """One model on one group. precision: the one that is asked for; None for any.

    engine: what serves, or would if it were not for `reason`.  fit: how well it fits, as `resolve` says it.
    remarks: what could not be checked.  too_old: whether a broken engine cannot run with the driver; building it
    again with the same compiler would not help then.
    """

    group: NodeGroup
    demand: Demand
    precision: Precision | None
    served: Served
    state: State
    engine: EngineEntry | None = None
    fit: str = ""
    reason: str = ""
    remarks: tuple[str, ...] = ()
    too_old: bool = False

    @property
    def serves(self) -> bool:
        """Whether a node of this group can pull an engine that will do."""
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
            "precision": self.precision,
            "group": self.group.name,
            "target": self.group.machine.target.name,
            "driver": self.group.machine.driver,
            "nodes": self.group.nodes,
            "state": self.state,
            "serves": self.serves,
            "engine": None if entry is None else {"unit": entry.unit, "status": entry.status, "digest": entry.digest},
            "fit": self.fit or None,
            "reason": self.reason or None,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True)
class Judgement:
    """What a standing is apart from its group: the same for all groups with the same machine."""

    state: State
    engine: EngineEntry | None = None
    fit: str = ""
    reason: str = ""
    remarks: tuple[str, ...] = ()
    too_old: bool = False


# By the place among what is served, the machine and the precision that is asked for.
Known = dict[tuple[int, Machine, Precision | None], "Judgement"]


def list_coverage(
    groups: Sequence[NodeGroup], served: Sequence[Served], catalog: Catalog, known: Known | None = None
) -> tuple[Coverage, ...]:
    """Every demand on every group that it names. Groups with equal machines are judged once.

    known: what was judged before of the same `served` and catalog; it is added to.
    """
    known = {} if known is None else known
    found = []
    for index, item in enumerate(served):
        demand = item.demand
        for group in groups:
            if not demand.wants(group.hardware):
                continue
            for precision in demand.precisions or (None,):
                key = (index, group.machine, precision)
                if key not in known:
                    known[key] = judge(item, group.machine, precision, dict(catalog.planned))
                judged = known[key]
                found.append(Coverage(group, demand, precision, item, **vars(judged)))
    return tuple(found)


def find_unwanted_groups(groups: Sequence[NodeGroup], demands: Sequence[Demand]) -> tuple[NodeGroup, ...]:
    """Groups with GPUs on which nothing must be served: a catalog that forgot them would look fine otherwise."""
    return tuple(
        group
        for group in groups
        if not group.machine.is_cpu and not any(demand.wants(group.hardware) for demand in demands)
    )


def judge(served: Served, machine: Machine, precision: Precision | None, planned: dict[str, str]) -> Judgement:
    """How a version stands on a machine. planned: facts of the machine that are coming."""
    if served.problem:
        return Judgement("missing", reason=served.problem)
    only_proven = served.demand.proven or served.proven_only
    wanted = Policy(precision, proven_only=only_proven)
    now = rank_engines(served.engines, machine, wanted, served.name)
    if not now.candidates:
        return _explain_lack(served, now, machine, wanted)
    best = now.candidates[0]
    found = Judgement("covered", best.entry, best.fit, remarks=best.remarks)
    if not machine.is_cpu and planned:
        then = rank_engines(served.engines, _apply_planned(machine, planned), wanted, served.name)
        if not then.candidates:
            return replace(found, state="breaking", reason=_why_not(then, best.entry))
    if best.entry.status != "proven":
        return replace(found, state="unproven", reason=best.entry.reason)
    return found


def _apply_planned(machine: Machine, planned: dict[str, str]) -> Machine:
    """The machine with what is planned for it; the CUDA version is the old driver's, and nobody knows the new one's."""
    driver = planned.get("driver")
    runtimes = {name: version for name, version in planned.items() if name != "driver"}
    after = machine.with_facts(driver=driver, runtimes=runtimes)
    return replace(after, cuda=None) if driver else after


def _explain_lack(served: Served, now: EngineRanking, machine: Machine, wanted: Policy) -> Judgement:
    """Why nothing will do: asked again with less and less that is in the way."""
    if wanted.proven_only:
        any_proof = rank_engines(served.engines, machine, replace(wanted, proven_only=False), served.name)
        if any_proof.candidates:
            best = any_proof.candidates[0]
            return Judgement("unproven", best.entry, best.fit, best.entry.reason, best.remarks)
    for too_old, machine_then in ((False, _without_runtimes(machine)), (True, _without_versions(machine))):
        then = rank_engines(served.engines, machine_then, replace(wanted, proven_only=False), served.name)
        if then.candidates:
            best = then.candidates[0]
            return Judgement("broken", best.entry, best.fit, _why_not(now, best.entry), too_old=too_old)
    return Judgement("missing", reason=_reason(served, now, machine))


def _without_runtimes(machine: Machine) -> Machine:
    return replace(machine, runtimes={})


def _without_versions(machine: Machine) -> Machine:
    return replace(_without_runtimes(machine), driver=None, cuda=None)


def _why_not(found: EngineRanking, entry: EngineEntry) -> str:
    return next((why for unit, why in found.rejected if unit == entry.unit), "")


def _reason(served: Served, found: EngineRanking, machine: Machine) -> str:
    """Reasons of what was built for this hardware; where there is none, what was built for."""
    alike = {
        entry.unit
        for entry in served.engines
        if entry.compute_capability == machine.compute_capability and (entry.target != PORTABLE or not machine.is_cpu)
    }
    reasons = list(dict.fromkeys(f"{unit}: {why}" for unit, why in found.rejected if unit in alike))
    if reasons:
        return join_first(reasons, 3, "; ")
    targets = sorted({entry.target for entry in served.engines})
    return f"no engine for {machine.target.sm}; {served.name} has {', '.join(targets) or 'no engine at all'}"
