"""NVIDIA GPU generations: compute capabilities, products and their memory.

From NVIDIA's CUDA GPU list (compute capabilities) and GPU feature discovery's node labels
(`nvidia.com/gpu.compute.major`, `.minor`, `nvidia.com/gpu.product`). Never select nodes by the `family` label: it
merges A100 with A10 and B200 with RTX PRO 6000.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One compute capability. products: short product name -> values of the node label `nvidia.com/gpu.product`."""

    compute_capability: tuple[int, int]
    family: str
    products: dict[str, tuple[str, ...]]

    @property
    def sm(self) -> str:
        """The architecture's name, such as 'sm_89'."""
        return "sm_{}{}".format(*self.compute_capability)

    @property
    def labels(self) -> dict[str, str]:
        """The node labels that select this generation on Kubernetes, with string values."""
        major, minor = self.compute_capability
        return {"nvidia.com/gpu.compute.major": str(major), "nvidia.com/gpu.compute.minor": str(minor)}


GENERATIONS: tuple[Generation, ...] = (
    Generation((7, 5), "turing", {"t4": ("Tesla-T4",)}),
    Generation(
        (8, 0),
        "ampere",
        {"a100": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-80GB-PCIe")},
    ),
    Generation((8, 6), "ampere", {"a10": ("NVIDIA-A10",), "a10g": ("NVIDIA-A10G",), "a40": ("NVIDIA-A40",)}),
    Generation(
        (8, 9), "ada", {"l4": ("NVIDIA-L4",), "l40s": ("NVIDIA-L40S",), "rtx4090": ("NVIDIA-GeForce-RTX-4090",)}
    ),
    Generation(
        (9, 0),
        "hopper",
        {
            "h100": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
            "h200": ("NVIDIA-H200",),
            "gh200": ("NVIDIA-GH200-480GB",),
        },
    ),
    Generation((10, 0), "blackwell", {"b200": ("NVIDIA-B200",)}),
    Generation((10, 3), "blackwell", {"b300": ("NVIDIA-B300-SXM6-AC",)}),
    Generation(
        (12, 0),
        "blackwell",
        {"rtxpro6000": ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",), "rtx5090": ("NVIDIA-GeForce-RTX-5090",)},
    ),
    Generation((12, 1), "blackwell", {"gb10": ("NVIDIA-GB10",)}),
)


# Products that the table above leaves out, by compute capability: from NVIDIA's lists of CUDA GPUs, and of those that
# CUDA 13 no longer supports.
OTHER_PRODUCTS: dict[tuple[int, int], tuple[str, ...]] = {
    (3, 7): ("k80",),
    (5, 2): ("m4", "m40", "m60"),
    (6, 0): ("p100",),
    (6, 1): ("p4", "p40", "gtx1080", "gtx1080ti"),
    (7, 0): ("v100", "v100s", "titanv"),
    (7, 2): ("xavier",),
    (7, 5): ("rtx2080", "rtx2080ti", "gtx1660"),
    (8, 0): ("a30", "a800"),
    (8, 6): ("a2", "a16", "a4000", "a5000", "a6000", "rtx3080", "rtx3090"),
    (8, 7): ("orin",),
    (8, 9): ("l20", "l40", "rtx4080", "rtx6000ada"),
    (9, 0): ("h20", "h800"),
    (10, 0): ("gb200",),
    (10, 3): ("gb300",),
    (12, 0): ("rtx5080",),
}
OLDER_FAMILIES = {"kepler": (3, 7), "maxwell": (5, 2), "pascal": (6, 0), "volta": (7, 0)}


def generation_of(compute_capability: tuple[int, int]) -> Generation | None:
    """The generation of a compute capability; None if the table does not have it."""
    return next((g for g in GENERATIONS if g.compute_capability == compute_capability), None)


def product_of(compute_capability: tuple[int, int], label: str) -> str | None:
    """The short name of the product that node labels call `label`; None for one that the table does not have."""
    generation = generation_of(compute_capability)
    products = generation.products if generation else {}
    return next((product for product, labels in products.items() if label in labels), None)
