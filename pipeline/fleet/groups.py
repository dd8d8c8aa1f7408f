"""Groups of equal machines in a fleet, from the labels of nodes."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from enginesmith.core.hardware.machine import Machine, product_of
from enginesmith.core.types import Target


@dataclass(frozen=True)
class Hardware:
    """Common hardware of the nodes of a group.

    machine: as a pod on such a node sees it. A MIG slice has no `machine.product`, because engines tuned for the whole
    GPU are not tuned for a slice.  label: the GPU's name in the node's labels, without the suffixes of MIG and sharing
    ('NVIDIA-A100-SXM4-40GB').  product: the GPU's short name ('a100'), also of a slice; None for a GPU that
    `enginesmith.core.hardware.machine` does not list.  mig: the slice's profile, '1g.10gb'.  sharing: 'time-slicing'
    or 'mps', among `replicas` pods.
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
        labels = [self.product or self.machine.target.name]
        labels += [f"mig-{self.mig}"] if self.mig else []
        labels += [f"shared by {self.replicas}"] if self.sharing else []
        return " ".join(labels)

    def is_one_of(self, targets: Sequence[Target]) -> bool:
        """Whether a target has this product, or has no product and this compute capability. A slice has the product of
        its GPU."""
        return any(
            target.product == self.product
            if target.product
            else target.compute_capability == self.machine.compute_capability
            for target in targets
        )


@dataclass(frozen=True)
class GpuPart:
    """The GPUs of one kind in one node. gpus: number of whole GPUs or of slices.  remarks: conditions that keep pods
    away."""

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
    """Nodes of one kind. gpus: total number of whole GPUs or of slices.  remarks: each with its number of nodes.
    hardware: of each node."""

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
        """The machine for which engines are chosen."""
        return self.hardware.machine

    def with_versions(self, *, driver: str | None = None, runtimes: Mapping[str, str] | None = None) -> "NodeGroup":
        """The group with these versions on its machines; None changes nothing."""
        machine = self.machine.with_facts(driver=driver, runtimes=runtimes)
        return replace(self, hardware=replace(self.hardware, machine=machine))

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        hardware, machine = self.hardware, self.machine
        return {
            "name": self.name,
            "target": machine.target.name,
            **{name: getattr(hardware, name) for name in ("label", "product", "mig", "sharing", "replicas")},
            **{name: getattr(machine, name) for name in ("compute_capability", "driver", "cuda", "memory_bytes")},
            "runtimes": dict(machine.runtimes),
            **{name: getattr(self, name) for name in ("nodes", "gpus", "remarks")},
        }


@dataclass(frozen=True)
class Fleet:
    """All groups, by compute capability and name, and the nodes without a group. source: of the data, for messages."""

    groups: tuple[NodeGroup, ...]
    left_out: tuple[LeftOut, ...] = field(default=())
    source: str = ""

    def with_groups(self, groups: Iterable[NodeGroup]) -> "Fleet":
        """The same fleet with other groups; groups with equal hardware are merged."""
        groups_by_hardware: dict[Hardware, NodeGroup] = {}
        for group in groups:
            if old_group := groups_by_hardware.get(group.hardware):
                totals = (old_group.nodes + group.nodes, old_group.gpus + group.gpus)
                group = NodeGroup(old_group.hardware, *totals, old_group.remarks + group.remarks)
            groups_by_hardware[group.hardware] = group
        return replace(self, groups=tuple(sorted(groups_by_hardware.values(), key=_order)))


def group_nodes(parts: Iterable[GpuPart], left_out: Iterable[LeftOut] = (), source: str = "") -> Fleet:
    """The fleet of these nodes: one group for each kind of hardware."""
    parts_by_hardware: dict[Hardware, list[GpuPart]] = {}
    for part in parts:
        parts_by_hardware.setdefault(part.hardware, []).append(part)
    groups = []
    for hardware, group_parts in parts_by_hardware.items():
        counts = Counter(remark for part in group_parts for remark in part.remarks)
        remarks = tuple(f"{count} {remark}" for remark, count in sorted(counts.items()))
        groups.append(
            NodeGroup(
                hardware, len({part.node for part in group_parts}), sum(part.gpus for part in group_parts), remarks
            )
        )
    return Fleet((), tuple(left_out), source).with_groups(groups)


def _order(group: NodeGroup) -> tuple[Any, ...]:
    machine, hardware = group.machine, group.hardware
    texts = (hardware.label, hardware.mig, hardware.sharing, machine.driver, machine.cuda)
    return machine.compute_capability or (0, 0), group.name, *(text or "" for text in texts), machine.memory_bytes or 0


# The GPUs of a Kubernetes node, from the labels of NVIDIA's GPU feature discovery (GFD).
#
# Labels, and the effects of MIG and sharing on them: docs/gpu-feature-discovery/README.md and README.md ("Shared Access
# to GPUs", "Catalog of Labels") of github.com/NVIDIA/k8s-device-plugin. Values are strings. In short:
#
# - MIG strategy `single`: product, count and memory describe slices ('...-MIG-1g.5gb'); '-MIG-INVALID' if the slices of
#   a node are not all alike. `mixed`: each kind of slice has separate labels; `gpu.replicas` is 0 if all GPUs of the
#   node are sliced.
# - Time-slicing and MPS add '-SHARED' to the product, unless they rename the resource. Under MPS each client gets an
#   equal part of the memory; time-slicing does not divide it.
# - GFD describes one kind of GPU per node; if a node has several kinds, it labels one.

_NVIDIA = "nvidia.com/"
_SLICES = re.compile(r"nvidia\.com/mig-(.+)\.count")
_DEVICE = re.compile(r"feature\.node\.kubernetes\.io/pci-(\d+_)?10de\.present")
_SHARED = "-SHARED"
_MIG = "-MIG-"
# GPU feature discovery states memory in MiB.
_MIB = 1 << 20
# Prefix of taints that Kubernetes sets itself. They repeat readiness and cordons, which are reported anyway.
_LIFECYCLE = "node.kubernetes.io/"
MOST_TEXT = 200
# Labels of the parts of a version: GFD's present spelling, then its former one.
_DRIVER = tuple(
    tuple(f"cuda.{prefix}.{part}" for part in parts)
    for prefix, parts in (("driver-version", ("major", "minor", "revision")), ("driver", ("major", "minor", "rev")))
)
_CUDA = tuple(
    tuple(f"cuda.{prefix}.{part}" for part in ("major", "minor")) for prefix in ("runtime-version", "runtime")
)


@dataclass(frozen=True)
class NodeLabels:
    """A node's labels. They may contain any text: many users of a cluster can label nodes."""

    all: Mapping[str, str]

    def text(self, name: str) -> str:
        """The value of a label with the prefix 'nvidia.com/'; '' if it is missing."""
        return self.all.get(_NVIDIA + name, "")

    def number(self, name: str) -> int | None:
        """A label as a whole number; None if it is not a number."""
        digits = self.text(name)
        return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 12 else None

    def version(self, full: str, *spellings: Sequence[str]) -> str | None:
        """The version in label `full`, else joined from the first of `spellings` with labels; None without one."""
        if re.fullmatch(r"\d[\w.]{0,30}", self.text(full), re.ASCII):
            return self.text(full)
        for names in spellings:
            numbers = takewhile(lambda name: self.number(name) is not None, names)
            if version_text := ".".join(map(self.text, numbers)):
                return version_text
        return None


def parts_of(node: Mapping[str, object]) -> Iterator[GpuPart | LeftOut]:
    """The parts of a node of the Kubernetes API: one, or one for each kind of MIG slice; or why it has none."""
    metadata = _read_mapping(node.get("metadata"))
    name = str(metadata.get("name") or "(without a name)")[:MOST_TEXT]
    labels = NodeLabels(
        {str(key): str(value)[:MOST_TEXT] for key, value in _read_mapping(metadata.get("labels")).items()}
    )
    capacity = _read_mapping(_read_mapping(node.get("status")).get("capacity"))
    resources = (key for key, value in capacity.items() if str(value) != "0")
    if not (
        any(_DEVICE.fullmatch(key) and value == "true" for key, value in labels.all.items())
        or labels.text("gpu.present") == "true"
        or labels.text("gpu.product")
        or any(key.startswith((_NVIDIA + "gpu", _NVIDIA + "mig-")) for key in resources)
    ):
        yield GpuPart(name, Hardware(Machine()), 0, _remarks(node))
        return
    reason = "its labels count no GPU and no MIG slice; check its device plugin"
    gpu_parts: list[GpuPart] = []
    if "MIG-INVALID" in labels.text("gpu.product"):
        reason = (
            "its MIG slices are not all alike (product '...-MIG-INVALID'); cut them alike, or use MIG strategy mixed"
        )
    elif _capability(labels) is None:
        reason = "has an NVIDIA GPU and no labels of GPU feature discovery (nvidia.com/gpu.compute.major); install it"
    else:
        gpu_parts += _parts(name, labels, capacity, _remarks(node))
    yield from gpu_parts
    if not gpu_parts:
        yield LeftOut(name, reason)


def _parts(
    node: str, labels: NodeLabels, capacity: Mapping[str, object], remarks: tuple[str, ...]
) -> Iterator[GpuPart]:
    slices = sorted(match[1] for key in labels.all if (match := _SLICES.fullmatch(key)))
    for kind in slices:
        if count := labels.number(f"mig-{kind}.count"):
            yield GpuPart(node, _hardware(labels, f"mig-{kind}", kind), count, remarks)
    # Under strategy `mixed`, a node with only sliced GPUs keeps the labels of the whole GPU, with 0 replicas.
    has_whole = labels.text("gpu.replicas") != "0" and str(capacity.get(_NVIDIA + "gpu", "1")) != "0"
    count = labels.number("gpu.count")
    if (not slices or has_whole) and count != 0:
        yield GpuPart(node, _hardware(labels, "gpu"), count or 1, remarks)


def _hardware(labels: NodeLabels, prefix: str, kind: str | None = None) -> Hardware:
    """The hardware that the labels with a prefix describe. kind: of a slice under MIG strategy `mixed`."""
    name, _, profile = labels.text(f"{prefix}.product").removesuffix(_SHARED).partition(_MIG)
    label, mig = (name or labels.text("gpu.product").removesuffix(_SHARED) or "unknown"), kind or profile or None
    replicas = labels.number(f"{prefix}.replicas") or 1
    sharing: str | None = labels.text(f"{prefix}.sharing-strategy")
    if sharing not in ("time-slicing", "mps"):  # GFD without this label supports time-slicing only
        sharing = "time-slicing" if sharing != "none" and replicas > 1 else None
    capability = _capability(labels)
    product = product_of(capability, label) if capability else None
    memory = (labels.number(f"{prefix}.memory") or 0) * _MIB
    machine = Machine(
        compute_capability=capability,
        product=None if mig else product,
        driver=labels.version("cuda.driver-version.full", *_DRIVER),
        cuda=labels.version("cuda.runtime-version.full", *_CUDA),
        memory_bytes=(memory // replicas if sharing == "mps" else memory) or None,
    )
    return Hardware(machine, label, product, mig, sharing, replicas if sharing else 1)


def _capability(labels: NodeLabels) -> tuple[int, int] | None:
    major, minor = labels.number("gpu.compute.major"), labels.number("gpu.compute.minor")
    return None if major is None or minor is None else (major, minor)


def _remarks(node: Mapping[str, object]) -> tuple[str, ...]:
    """Conditions that keep pods away from a node: not ready, cordoned, and taints, which GPU pods may tolerate."""
    spec, conditions = _read_mapping(node.get("spec")), _read_mapping(node.get("status")).get("conditions")
    remarks = []
    states = [condition.get("status") for condition in _mappings(conditions) if condition.get("type") == "Ready"]
    if states and states[-1] != "True":
        remarks.append("not ready")
    if spec.get("unschedulable") is True:
        remarks.append("cordoned")
    for taint in _mappings(spec.get("taints")):
        if not str(taint.get("key", "")).startswith(_LIFECYCLE):
            taint_value = f"={taint['value']}" if taint.get("value") else ""
            remarks.append(f"tainted {taint.get('key')}{taint_value}:{taint.get('effect')}"[:MOST_TEXT])
    return tuple(remarks)


def _read_mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, object]]:
    return [element for element in value if isinstance(element, Mapping)] if isinstance(value, list) else []
