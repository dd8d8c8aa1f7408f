"""Values: groups of nodes for which the same engines fit, and a whole fleet of them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from enginesmith.core.hardware.machine import Machine
from enginesmith.core.types import Target


@dataclass(frozen=True)
class Hardware:
    """What the nodes of a group have in common.

    machine: the machine that a pod on such a node sees. That of a MIG slice has no product: engines tuned for the whole
    GPU are not tuned for it.
    label: the GPU's name by the node's labels, without what MIG and sharing add ('NVIDIA-A100-SXM4-40GB').
    product: its short name ('a100'), also of a slice; None for one that `enginesmith.core.hardware.targets` does not
    have. mig: the slice, '1g.10gb'.  sharing: 'time-slicing' or 'mps', by `replicas` pods at once.
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
        """Whether one of the targets has its product, or names no product and has its compute capability. Slices have
        the product of their GPU."""
        return any(
            target.product == self.product
            if target.product
            else target.compute_capability == self.machine.compute_capability
            for target in targets
        )


@dataclass(frozen=True)
class GpuPart:
    """The GPUs of one kind in one node. gpus: number of whole ones or slices.  remarks: what keeps pods away."""

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
    """Nodes of one kind. gpus: number of whole ones or slices, in total.  remarks: each with its number of nodes."""

    hardware: Hardware
    nodes: int
    gpus: int
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its hardware."""
        return self.hardware.name

    @property
    def machine(self) -> Machine:
        """The machine that engines are chosen for."""
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
    """Every group, by compute capability and name, and the nodes that are in none. source: where it was read from."""

    groups: tuple[NodeGroup, ...]
    left_out: tuple[LeftOut, ...] = field(default=())
    source: str = ""

    def with_groups(self, groups: Iterable[NodeGroup]) -> "Fleet":
        """The same fleet with other groups, of which those of the same hardware become one."""
        found: dict[Hardware, NodeGroup] = {}
        for group in groups:
            if one := found.get(group.hardware):
                numbers = (one.nodes + group.nodes, one.gpus + group.gpus)
                group = NodeGroup(one.hardware, *numbers, one.remarks + group.remarks)
            found[group.hardware] = group
        return replace(self, groups=tuple(sorted(found.values(), key=_order)))


def group_nodes(parts: Iterable[GpuPart], left_out: Iterable[LeftOut] = (), source: str = "") -> Fleet:
    """The fleet of these nodes: one group for each kind of hardware."""
    members: dict[Hardware, list[GpuPart]] = {}
    for part in parts:
        members.setdefault(part.hardware, []).append(part)
    groups = []
    for hardware, found in members.items():
        counts = Counter(remark for part in found for remark in part.remarks)
        remarks = tuple(f"{count} {remark}" for remark, count in sorted(counts.items()))
        groups.append(
            NodeGroup(hardware, len({part.node for part in found}), sum(part.gpus for part in found), remarks)
        )
    return Fleet((), tuple(left_out), source).with_groups(groups)


def _order(group: NodeGroup) -> tuple[Any, ...]:
    machine, hardware = group.machine, group.hardware
    facts = (hardware.label, hardware.mig, hardware.sharing, machine.driver, machine.cuda)
    return machine.compute_capability or (0, 0), group.name, *(fact or "" for fact in facts), machine.memory_bytes or 0
