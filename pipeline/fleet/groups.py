"""Groups of nodes that are alike as far as engines go, and what is known of a whole fleet."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from enginery.core.hardware.machine import Machine
from enginery.core.types import Target


@dataclass(frozen=True)
class Hardware:
    """What nodes must have in common to be one group.

    machine: what engines are chosen for, as a pod on such a node sees it. A MIG slice has no product there: it is no
    whole GPU of that product, and what was tuned for one is not tuned for it.
    label: what the node calls its GPU, without what MIG and sharing add ('NVIDIA-A100-SXM4-40GB').
    product: its short name ('a100'), also of a slice; None for one that `enginery.core.hardware.targets` does not have.
    mig: the slice, '1g.10gb'.  sharing: 'time-slicing' or 'mps', by `replicas` pods at once.
    """

    machine: Machine
    label: str = "cpu"
    product: str | None = None
    mig: str | None = None
    sharing: str | None = None
    replicas: int = 1

    @property
    def name(self) -> str:
        """'l4', 'a100 mig-1g.10gb', 't4 shared by 4', 'cpu'."""
        words = [self.product or self.machine.target.name]
        words += [f"mig-{self.mig}"] if self.mig else []
        words += [f"shared by {self.replicas}"] if self.sharing else []
        return " ".join(words)

    def is_one_of(self, targets: Sequence[Target]) -> bool:
        """Whether a name in a catalog means this: its product, or its compute capability; slices go with their GPU."""
        return any(
            target.product == self.product
            if target.product
            else target.compute_capability == self.machine.compute_capability
            for target in targets
        )


@dataclass(frozen=True)
class GpuPart:
    """What one node has of one kind. gpus: whole ones or slices.  remarks: what keeps pods away from it now."""

    node: str
    hardware: Hardware
    gpus: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A node that could not be placed in a group, and why."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind. gpus: whole ones or slices, of all of them.  remarks: how many nodes each is about."""

    hardware: Hardware
    nodes: int
    gpus: int
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As its hardware is called."""
        return self.hardware.name

    @property
    def machine(self) -> Machine:
        """What engines are chosen for."""
        return self.hardware.machine

    def with_versions(self, *, driver: str | None = None, runtimes: Mapping[str, str] | None = None) -> "NodeGroup":
        """The group with these versions on its machines; None changes nothing."""
        machine = self.machine.with_facts(driver=driver, runtimes=runtimes)
        return replace(self, hardware=replace(self.hardware, machine=machine))

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        hardware = self.hardware
        return {
            "name": self.name,
            "target": self.machine.target.name,
            "label": hardware.label,
            "product": hardware.product,
            "compute_capability": self.machine.compute_capability,
            "driver": self.machine.driver,
            "cuda": self.machine.cuda,
            "runtimes": dict(self.machine.runtimes),
            "memory_bytes": self.machine.memory_bytes,
            "mig": hardware.mig,
            "sharing": hardware.sharing,
            "replicas": hardware.replicas,
            "nodes": self.nodes,
            "gpus": self.gpus,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True)
class Fleet:
    """Every group, by compute capability and name, and the nodes that are in none. source: where this was read."""

    groups: tuple[NodeGroup, ...]
    left_out: tuple[LeftOut, ...] = field(default=())
    source: str = ""

    def with_groups(self, groups: Iterable[NodeGroup]) -> "Fleet":
        """The same fleet with other groups, those of the same hardware put together."""
        found: dict[Hardware, NodeGroup] = {}
        for group in groups:
            one = found.get(group.hardware)
            found[group.hardware] = (
                group
                if one is None
                else NodeGroup(
                    one.hardware, one.nodes + group.nodes, one.gpus + group.gpus, one.remarks + group.remarks
                )
            )
        return replace(self, groups=tuple(sorted(found.values(), key=_order)))


def group_nodes(parts: Iterable[GpuPart], left_out: Iterable[LeftOut] = (), source: str = "") -> Fleet:
    """The fleet that these nodes are."""
    members: dict[Hardware, list[GpuPart]] = {}
    for part in parts:
        members.setdefault(part.hardware, []).append(part)
    groups = (_group(hardware, found) for hardware, found in members.items())
    return Fleet((), tuple(left_out), source).with_groups(groups)


def _group(hardware: Hardware, parts: Sequence[GpuPart]) -> NodeGroup:
    remarks = Counter(remark for part in parts for remark in part.remarks)
    words = tuple(f"{count} {remark}" for remark, count in sorted(remarks.items()))
    return NodeGroup(hardware, len({part.node for part in parts}), sum(part.gpus for part in parts), words)


def _order(group: NodeGroup) -> tuple[Any, ...]:
    machine, hardware = group.machine, group.hardware
    facts = (hardware.label, hardware.mig, hardware.sharing, machine.driver, machine.cuda)
    return machine.compute_capability or (0, 0), group.name, *(fact or "" for fact in facts), machine.memory_bytes or 0
