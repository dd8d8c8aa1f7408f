"""Nodes as the Kubernetes API gives them, with the labels that GPU feature discovery writes.

Written by hand from docs/gpu-feature-discovery/README.md and README.md of github.com/NVIDIA/k8s-device-plugin (names
and meaning of labels, MIG strategies, sharing) and docs.nvidia.com/datacenter/cloud-native/gpu-operator (whole nodes in
"GPU Operator with MIG", "Time-Slicing GPUs", "Multi-Process Service"). Products, compute capabilities and memory are
those of the parts, drivers are releases of their branches.
"""

from typing import Any

Json = dict[str, Any]


def node(
    name: str,
    labels: dict[str, str] | None = None,
    *,
    gpus: int | None = None,
    capacity: dict[str, str] | None = None,
    ready: str = "True",
    cordoned: bool = False,
    taints: list[Json] | None = None,
) -> Json:
    """A node. gpus: what its capacity offers as nvidia.com/gpu."""
    offered_fields = {"cpu": "32", "memory": "131072000Ki", "pods": "110", **(capacity or {})}
    offered_fields |= {} if gpus is None else {"nvidia.com/gpu": str(gpus)}
    spec: Json = {"providerID": f"aws:///eu-central-1a/{name}"}
    spec |= {"unschedulable": True} if cordoned else {}
    spec |= {"taints": taints} if taints else {}
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/arch": "amd64", "kubernetes.io/hostname": name, **(labels or {})},
        },
        "spec": spec,
        "status": {
            "capacity": offered_fields,
            "allocatable": offered_fields,
            "conditions": [
                {"type": "MemoryPressure", "status": "False"},
                {"type": "Ready", "status": ready, "reason": "KubeletReady"},
            ],
            "nodeInfo": {"kubeletVersion": "v1.34.1", "operatingSystem": "linux"},
        },
    }


def gfd(
    product: str, capability: str, memory: int, driver: str, cuda: str, family: str, count: int = 1, **more: str
) -> dict[str, str]:
    """The labels of a node with whole GPUs. more: others, '-' for '_' and '/' added."""
    major, minor = capability.split(".")
    new_driver = dict(zip(("major", "minor", "revision"), driver.split("."), strict=False))
    old_driver = dict(zip(("major", "minor", "rev"), driver.split("."), strict=False))
    runtime = dict(zip(("major", "minor"), cuda.split("."), strict=False))
    entries = {
        "cuda.driver-version.full": driver,
        **{f"cuda.driver-version.{name}": value for name, value in new_driver.items()},
        **{f"cuda.driver.{name}": value for name, value in old_driver.items()},
        "cuda.runtime-version.full": cuda,
        **{f"cuda.runtime-version.{name}": value for name, value in runtime.items()},
        **{f"cuda.runtime.{name}": value for name, value in runtime.items()},
        "gfd.timestamp": "1763650000",
        "gpu.compute.major": major,
        "gpu.compute.minor": minor,
        "gpu.count": str(count),
        "gpu.family": family,
        "gpu.machine": "Standard-PC-Q35-ICH9-2009",
        "gpu.memory": str(memory),
        "gpu.mode": "compute",
        "gpu.present": "true",
        "gpu.product": product,
        "gpu.replicas": "1",
        "gpu.sharing-strategy": "none",
        "mig.capable": "false",
        "mig.strategy": "single",
        "mps.capable": "false",
        "vgpu.present": "false",
        **more,
    }
    pci = {"feature.node.kubernetes.io/pci-10de.present": "true"}
    return {**pci, **{f"nvidia.com/{name}": value for name, value in entries.items()}}


def slices(kind: str, product: str, count: int, memory: int) -> dict[str, str]:
    """What MIG strategy `mixed` adds for one kind of slice."""
    entries = {
        "count": str(count),
        "engines.copy": "1",
        **{f"engines.{name}": "0" for name in ("decoder", "encoder", "jpeg", "ofa")},
        "memory": str(memory),
        "multiprocessors": "14",
        "product": f"{product}-MIG-{kind}",
        "replicas": "1",
        "sharing-strategy": "none",
        "slices.ci": kind[0],
        "slices.gi": kind[0],
    }
    return {f"mig-{kind}.{name}": value for name, value in entries.items()}


A100 = "NVIDIA-A100-SXM4-80GB"
H100 = "NVIDIA-H100-80GB-HBM3"
PRO = "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}

T4_LABELS = gfd("Tesla-T4", "7.5", 15360, "535.183.06", "12.2", "turing")
L4_LABELS = gfd("NVIDIA-L4", "8.9", 23034, "580.95.05", "13.0", "ada-lovelace")

WHOLE = {
    "t4": node("t4-0", T4_LABELS, gpus=1),
    "a10": node("a10-0", gfd("NVIDIA-A10", "8.6", 23028, "570.124.06", "12.8", "ampere"), gpus=1),
    "a100-40": node("a100-40", gfd("NVIDIA-A100-SXM4-40GB", "8.0", 40960, "550.127.08", "12.4", "ampere", 8), gpus=8),
    "a100-80": node("a100-80", gfd(A100, "8.0", 81920, "570.124.06", "12.8", "ampere", 8), gpus=8),
    "l4": node("l4-0", L4_LABELS, gpus=1),
    "l40s": node("l40s-0", gfd("NVIDIA-L40S", "8.9", 46068, "575.57.08", "12.9", "ada-lovelace", 4), gpus=4),
    "h100": node("h100-0", gfd(H100, "9.0", 81559, "580.95.05", "13.0", "hopper", 8), gpus=8),
    "h200": node("h200-0", gfd("NVIDIA-H200", "9.0", 143771, "580.95.05", "13.0", "hopper", 8), gpus=8),
    "b200": node("b200-0", gfd("NVIDIA-B200", "10.0", 183359, "580.95.05", "13.0", "blackwell", 8), gpus=8),
    "rtxpro6000": node("pro-0", gfd(PRO, "12.0", 97887, "580.95.05", "13.0", "blackwell", 2), gpus=2),
}

# Eight A100, each cut into seven: the counts, product and memory are of the slices.
MIG_SINGLE = node(
    "mig-single",
    gfd(f"{A100}-MIG-1g.10gb", "8.0", 9728, "570.124.06", "12.8", "ampere", 56)
    | {"nvidia.com/mig.capable": "true", "nvidia.com/mig.config": "all-1g.10gb", "nvidia.com/gpu.slices.gi": "1"},
    gpus=56,
)
# One H100 cut into three kinds of slices; no GPU is left whole, which `replicas` says.
MIG_MIXED = node(
    "mig-mixed",
    gfd(H100, "9.0", 81559, "580.95.05", "13.0", "hopper", 1)
    | {"nvidia.com/mig.capable": "true", "nvidia.com/mig.strategy": "mixed", "nvidia.com/gpu.replicas": "0"}
    | {f"nvidia.com/{name}": value for name, value in slices("1g.10gb", H100, 2, 9984).items()}
    | {f"nvidia.com/{name}": value for name, value in slices("3g.40gb", H100, 1, 40448).items()},
    gpus=0,
    capacity={"nvidia.com/mig-1g.10gb": "2", "nvidia.com/mig-3g.40gb": "1"},
)
# Two A100, one cut in two and one whole.
MIG_HALF = node(
    "mig-half",
    gfd(A100, "8.0", 81920, "570.124.06", "12.8", "ampere", 2)
    | {"nvidia.com/mig.capable": "true", "nvidia.com/mig.strategy": "mixed"}
    | {f"nvidia.com/{name}": value for name, value in slices("3g.40gb", A100, 2, 40192).items()},
    gpus=1,
    capacity={"nvidia.com/mig-3g.40gb": "2"},
)
MIG_INVALID = node("mig-invalid", gfd(f"{A100}-MIG-INVALID", "8.0", 0, "570.124.06", "12.8", "ampere", 0), gpus=0)
TIME_SHARED = node(
    "t4-shared",
    T4_LABELS
    | {
        "nvidia.com/gpu.product": "Tesla-T4-SHARED",
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
    },
    gpus=4,
)
# `renameByDefault: true`: nvidia.com/gpu.shared is what is offered, and the product stays as it is.
RENAMED = node(
    "t4-renamed",
    T4_LABELS | {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing"},
    gpus=0,
    capacity={"nvidia.com/gpu.shared": "4"},
)
MPS = node(
    "l4-mps",
    L4_LABELS
    | {
        "nvidia.com/gpu.product": "NVIDIA-L4-SHARED",
        "nvidia.com/gpu.replicas": "2",
        "nvidia.com/gpu.sharing-strategy": "mps",
        "nvidia.com/mps.capable": "true",
    },
    gpus=2,
)
# An old GFD: driver labels without 'version', no strategy label, no revision.
OLD_LABELS = node(
    "old",
    {
        key: value
        for key, value in gfd("Tesla-T4-SHARED", "7.5", 15360, "470.82", "11.4", "turing").items()
        if "-version" not in key and "sharing" not in key
    }
    | {"nvidia.com/gpu.replicas": "2", "nvidia.com/cuda.driver.rev": ""},
    gpus=2,
)
NO_GFD = node("no-gfd", {"feature.node.kubernetes.io/pci-0302_10de.present": "true"}, gpus=2)
CPU = node("cpu-0")
