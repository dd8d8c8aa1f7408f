"""The GPU generations a fleet can hold: compute capability, the names people call them, products and node labels.

Source: NVIDIA's CUDA GPU list (compute capabilities) and GPU feature discovery's node labels
(`nvidia.com/gpu.compute.major`, `.minor`, `nvidia.com/gpu.product`). Never select nodes by the `family` label: it
merges A100 with A10 and B200 with RTX PRO 6000.
"""

from dataclasses import dataclass
from functools import lru_cache

from enginery.core.errors import UnknownNameError
from enginery.core.hardware.cpu_kinds import KINDS, kind_named
from enginery.core.text import suggest
from enginery.core.types import Target


@dataclass(frozen=True)
class Generation:
    """One compute capability. products: short product name -> values of the node label `nvidia.com/gpu.product`."""

    compute_capability: tuple[int, int]
    family: str
    products: dict[str, tuple[str, ...]]

    @property
    def sm(self) -> str:
        """'sm_89'."""
        return "sm_{}{}".format(*self.compute_capability)

    @property
    def labels(self) -> dict[str, str]:
        """Node labels that select this generation on Kubernetes; all label values are strings."""
        major, minor = self.compute_capability
        return {"nvidia.com/gpu.compute.major": str(major), "nvidia.com/gpu.compute.minor": str(minor)}


GENERATIONS: tuple[Generation, ...] = (
    Generation((7, 5), "turing", {"t4": ("Tesla-T4",)}),
    Generation(
        (8, 0),
        "ampere",
        {
            "a100": (
                "NVIDIA-A100-SXM4-40GB",
                "NVIDIA-A100-SXM4-80GB",
                "NVIDIA-A100-PCIE-40GB",
                "NVIDIA-A100-80GB-PCIe",
            ),
        },
    ),
    Generation((8, 6), "ampere", {"a10": ("NVIDIA-A10",), "a10g": ("NVIDIA-A10G",), "a40": ("NVIDIA-A40",)}),
    Generation(
        (8, 9),
        "ada",
        {"l4": ("NVIDIA-L4",), "l40s": ("NVIDIA-L40S",), "rtx4090": ("NVIDIA-GeForce-RTX-4090",)},
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
        {
            "rtxpro6000": ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",),
            "rtx5090": ("NVIDIA-GeForce-RTX-5090",),
        },
    ),
    Generation((12, 1), "blackwell", {"gb10": ("NVIDIA-GB10",)}),
)

CPU = Target("cpu")
_FAMILY_ALIASES = {"ada-lovelace": "ada", "lovelace": "ada"}


def generation_of(compute_capability: tuple[int, int]) -> Generation | None:
    """The known generation of a compute capability, or None."""
    return next((g for g in GENERATIONS if g.compute_capability == compute_capability), None)


def product_of(compute_capability: tuple[int, int], label: str) -> str | None:
    """The short name of the product that node labels call `label`; None for one that the table does not have."""
    generation = generation_of(compute_capability)
    products = generation.products if generation else {}
    return next((product for product, labels in products.items() if label in labels), None)


def names() -> list[str]:
    """Every name a spec may use for a target or a group of them."""
    out = ["cpu", "gpu", "all", *(kind.name for kind in KINDS)]
    for generation in GENERATIONS:
        out += [generation.sm, *generation.products]
    return out + sorted({g.family for g in GENERATIONS})


@lru_cache(maxsize=256)
def parse_targets(name: str) -> tuple[Target, ...]:
    """Targets that a name stands for, in order of capability.

    `sm_89` (or `sm89`, `8.9`), a product (`l4`), a family (`ampere`: each of its capabilities), `cpu` (this machine's
    kind of CPU), a kind of CPU (`x86-64-v3`, `avx512-vnni`, `arm64-dotprod`: `cpu_kinds.KINDS`), `gpu` (every
    generation) or `all` (those and `cpu`). Raises UnknownNameError with the nearest known name.
    """
    key = name.strip().lower().replace(" ", "")
    key = _FAMILY_ALIASES.get(key, key)
    if key == "cpu":
        return (CPU,)
    if kind := kind_named(key):
        return (Target(kind.name),)
    if key in ("gpu", "all"):
        gpus = tuple(Target(g.sm, g.compute_capability) for g in GENERATIONS)
        return gpus if key == "gpu" else (*gpus, CPU)
    found = _by_capability(key) or _by_product(key) or _by_family(key)
    if not found:
        raise UnknownNameError(f"target {name!r} is not known; {suggest(key, names())}")
    return found


def _by_capability(key: str) -> tuple[Target, ...]:
    bare = key.removeprefix("sm").lstrip("_").replace(".", "")
    return tuple(Target(g.sm, g.compute_capability) for g in GENERATIONS if g.sm == f"sm_{bare}")


def _by_product(key: str) -> tuple[Target, ...]:
    wanted = key.replace("-", "").replace("_", "")
    return tuple(Target(wanted, g.compute_capability, wanted) for g in GENERATIONS if wanted in g.products)


def _by_family(key: str) -> tuple[Target, ...]:
    return tuple(Target(g.sm, g.compute_capability) for g in GENERATIONS if g.family == key)
