"""Whether the registry has an engine of a model for a group of nodes, as `enginesmith.client.resolve` ranks engines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from enginesmith.client.resolve import PORTABLE, EngineRanking, Policy, rank_engines
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.text import join_first
from enginesmith.core.types import Precision
from enginesmith.registry.manifest import EngineEntry
from pipeline.fleet.catalog import Catalog, Demand, Served
from pipeline.fleet.groups import NodeGroup

# From worst to best. missing: no engine was built for this hardware.  broken: it does not run with the group's driver
# and runtime.  unproven: it never ran on its hardware.  breaking: it will not run with the versions planned.
State = Literal["missing", "broken", "unproven", "breaking", "covered"]
STATES: tuple[State, ...] = ("missing", "broken", "unproven", "breaking", "covered")


@dataclass(frozen=True)
class Coverage:
    """The engine of one model for one group of nodes. precision: the one that is asked for; None for any.

    engine: the one that serves, or that would but for `reason`.  fit: how well it fits, in `pull --explain`'s words.
    remarks: what could not be checked.  too_old: whether a broken engine cannot run with the driver; building it
    again with the same compiler would not help then.
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
        """The demand that this is about."""
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


# By the index in `served`, the machine and the precision that is asked for.
Known = dict[tuple[int, Machine, Precision | None], Coverage]


def list_coverage(
    groups: Sequence[NodeGroup], served: Sequence[Served], catalog: Catalog, known: Known | None = None
) -> tuple[Coverage, ...]:
    """The coverage of every demand on every group that it names. Groups with equal machines are judged once.

    known: results of earlier calls with the same `served` and catalog; new ones are added.
    """
    known = {} if known is None else known
    found = []
    for index, item in enumerate(served):
        for group in groups:
            if not item.demand.wants(group.hardware):
                continue
            for precision in item.demand.precisions or (None,):
                key = (index, group.machine, precision)
                if key not in known:
                    known[key] = judge(item, group, precision, dict(catalog.planned))
                found.append(replace(known[key], group=group))
    return tuple(found)


def find_unwanted_groups(groups: Sequence[NodeGroup], demands: Sequence[Demand]) -> tuple[NodeGroup, ...]:
    """Groups with GPUs that no demand names, as a catalog may have forgotten them."""
    return tuple(
        group
        for group in groups
        if not group.machine.is_cpu and not any(demand.wants(group.hardware) for demand in demands)
    )


def judge(served: Served, group: NodeGroup, precision: Precision | None, planned: dict[str, str]) -> Coverage:
    """The coverage of a version on one group. planned: versions that the group's machines are to get, by name."""
    missing, machine = Coverage(served, group, precision, "missing"), group.machine
    if served.problem:
        return replace(missing, reason=served.problem)
    wanted = Policy(precision, proven_only=missing.only_proven)
    now = rank_engines(served.engines, machine, wanted, served.name, partial(served.find_speeds, machine))
    if not now.candidates:
        return _explain_lack(missing, now, wanted)
    best = now.candidates[0]
    found = replace(missing, state="covered", engine=best.entry, fit=best.fit, remarks=best.remarks)
    if not machine.is_cpu and planned:
        after = machine.with_facts(runtimes={name: text for name, text in planned.items() if name != "driver"})
        if driver := planned.get("driver"):  # the newest CUDA version is the old driver's; the new one's is not known
            after = replace(after, driver=driver, cuda=None)
        then = rank_engines(served.engines, after, wanted, served.name)
        if not then.candidates:
            return replace(found, state="breaking", reason=_find_reason(then, best.entry))
    if best.entry.status != "proven":
        return replace(found, state="unproven", reason=best.entry.reason)
    return found


def _explain_lack(missing: Coverage, now: EngineRanking, wanted: Policy) -> Coverage:
    """The coverage where no engine will do: engines are ranked again without one condition after the other."""
    served, machine, any_proof = missing.served, missing.group.machine, replace(wanted, proven_only=False)
    if wanted.proven_only and (found := rank_engines(served.engines, machine, any_proof, served.name).candidates):
        best = found[0]
        ranked = replace(missing, engine=best.entry, fit=best.fit, remarks=best.remarks)
        return replace(ranked, state="unproven", reason=best.entry.reason)
    unversioned = replace(machine, runtimes={})
    for too_old, then in ((False, unversioned), (True, replace(unversioned, driver=None, cuda=None))):
        if found := rank_engines(served.engines, then, any_proof, served.name).candidates:
            entry, reason = found[0].entry, _find_reason(now, found[0].entry)
            return replace(missing, state="broken", engine=entry, fit=found[0].fit, reason=reason, too_old=too_old)
    return replace(missing, reason=_list_reasons(served, now, machine))


def _find_reason(found: EngineRanking, entry: EngineEntry) -> str:
    """Why the ranking rejects an engine; '' if it does not."""
    return next((why for unit, why in found.rejected if unit == entry.unit), "")


def _list_reasons(served: Served, found: EngineRanking, machine: Machine) -> str:
    """Why each engine for this hardware is rejected; if there is none, the targets that there are engines for."""
    alike = {
        entry.unit
        for entry in served.engines
        if entry.compute_capability == machine.compute_capability and (entry.target != PORTABLE or not machine.is_cpu)
    }
    reasons = list(dict.fromkeys(f"{unit}: {why}" for unit, why in found.rejected if unit in alike))
    if reasons:
        return join_first(reasons, 3, "; ")
    targets = sorted({entry.target for entry in served.engines if entry.usable})
    return f"no engine for {machine.target.sm}; {served.name} has {', '.join(targets) or 'no engine at all'}"
