"""The nodes of the test cluster: two without a GPU, and five kinds of GPU with the labels of GPU feature discovery."""

from tests.cluster.api import Object

DRIVER = "580.95.05"


def gpu_node(
    product: str, capability: str, family: str, memory_mib: int, gpus: int = 1, driver: str = DRIVER
) -> Object:
    """A node's labels, taint and capacity, as NVIDIA's device plugin and GPU feature discovery write them."""
    major, minor = capability.split(".")
    parts = driver.split(".")
    labels = {
        "gpu.present": "true", "gpu.product": product, "gpu.family": family, "gpu.count": str(gpus),
        "gpu.replicas": "1", "gpu.compute.major": major, "gpu.compute.minor": minor,
        "gpu.memory": str(memory_mib),
        "gpu.sharing-strategy": "none", "mig.capable": "false", "mig.strategy": "single",
        "cuda.driver-version.full": driver, "cuda.driver-version.major": parts[0],
        "cuda.driver-version.minor": parts[1], "cuda.driver-version.revision": parts[2],
        "cuda.runtime-version.full": "13.0", "cuda.runtime-version.major": "13", "cuda.runtime-version.minor": "0",
    }  # fmt: skip
    return {
        "labels": {f"nvidia.com/{name}": value for name, value in labels.items()},
        "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}],
        "capacity": {"nvidia.com/gpu": str(gpus)},
    }


NODES: dict[str, Object] = {
    "cpu-1": {},
    "cpu-2": {},
    "t4-1": gpu_node("Tesla-T4", "7.5", "turing", 15360, driver="535.183.06"),
    "a100-1": gpu_node("NVIDIA-A100-SXM4-80GB", "8.0", "ampere", 81920, gpus=2),
    "l4-1": gpu_node("NVIDIA-L4", "8.9", "ada-lovelace", 23034),
    "l4-2": gpu_node("NVIDIA-L4", "8.9", "ada-lovelace", 23034),
    "rtx4090-1": gpu_node("NVIDIA-GeForce-RTX-4090", "8.9", "ada-lovelace", 24564),
    "rtx5090-1": gpu_node("NVIDIA-GeForce-RTX-5090", "12.0", "blackwell", 32607),
}


def node(name: str, has: Object) -> tuple[Object, Object]:
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    body = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, **has.get("labels", {})}},
        "spec": {"taints": has.get("taints", [])},
    }
    room = {"cpu": "64", "memory": "256Gi", "pods": "200", "ephemeral-storage": "2Ti", **has.get("capacity", {})}
    ready_fields = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "a fake kubelet's node"}
    return body, {"status": {"capacity": room, "allocatable": room, "conditions": [ready_fields]}}
